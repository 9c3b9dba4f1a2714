#pragma once

#include <chrono>
#include <iostream>
#include <string>
#include <utility>

namespace sherd::bench {

/// Wall time of `body`, in seconds.
template <class Body>
double seconds_of(const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Lets a script (bench/contenders.py) run the cases of a program in turn with another's: prints "ready " and
/// `facts` (JSON), then answers each line of standard input with what `answer` makes of it, a number or an
/// object of JSON, until the input ends.
template <class Answer>
void serve(const std::string& facts, Answer&& answer) {
  std::cout.precision(9);
  std::cout << "ready " << facts << std::endl;
  for (std::string line; std::getline(std::cin, line);) std::cout << answer(std::as_const(line)) << std::endl;
}

}  // namespace sherd::bench
