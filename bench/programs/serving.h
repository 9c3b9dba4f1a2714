#pragma once

#include <sys/resource.h>

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

/// Seconds that this process has spent on processors.
inline double processor_seconds() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
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
