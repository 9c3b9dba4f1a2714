// The offload store's bandwidth: whole buffers of a pool to and from a span, with the next ones always under
// way, as the optimizer's pipeline does it. Prints one JSON object. bench/store_vs_fio.sh sets it beside fio.
//
//   bench_store --folder DIR [--mode read|write|mixed] [--seconds 3] [--mib 1024] [--buffer-mib 16]
//   [--buffers 4]
//               [--block 1048576] [--depth 8] [--backend automatic|io_uring|threads] [--threads 2]
//               [--checksums]
#include <sys/resource.h>

#include <chrono>
#include <iostream>
#include <string>

#include "base/error.h"
#include "cli/bench/disk_traffic.h"

namespace {

using namespace sherd;
using namespace sherd::offload;
using Clock = std::chrono::steady_clock;

struct Settings {
  StoreOptions store;
  cli::Traffic mode = cli::Traffic::read;
  double seconds = 3;
  std::size_t span_bytes = std::size_t{1} << 30, buffer_bytes = std::size_t{16} << 20;
  int buffers = 4;
};

StoreOptions::Backend backend_of(const std::string& name) {
  if (name == "automatic") return StoreOptions::Backend::automatic;
  if (name == "io_uring") return StoreOptions::Backend::io_uring;
  if (name == "threads") return StoreOptions::Backend::threads;
  fail(ErrorKind::usage, "--backend is automatic, io_uring or threads, not ", name);
}

cli::Traffic traffic_of(const std::string& name) {
  for (const cli::Traffic traffic : {cli::Traffic::read, cli::Traffic::write, cli::Traffic::mixed})
    if (cli::name_of(traffic) == name) return traffic;
  fail(ErrorKind::usage, "--mode is read, write or mixed, not ", name);
}

Settings parse(int argc, char** argv) {
  Settings s;
  for (int i = 1; i < argc; ++i) {
    const std::string key = argv[i];
    if (key == "--checksums") {
      s.store.checksums = true;
      continue;
    }
    require(i + 1 < argc, key, " needs a value");
    const std::string value = argv[++i];
    if (key == "--folder")
      s.store.folder = value;
    else if (key == "--mode")
      s.mode = traffic_of(value);
    else if (key == "--seconds")
      s.seconds = std::stod(value);
    else if (key == "--mib")
      s.span_bytes = std::stoull(value) << 20;
    else if (key == "--buffer-mib")
      s.buffer_bytes = std::stoull(value) << 20;
    else if (key == "--buffers")
      s.buffers = std::stoi(value);
    else if (key == "--block")
      s.store.block_size = std::stoull(value);
    else if (key == "--depth")
      s.store.queue_depth = std::stoi(value);
    else if (key == "--backend")
      s.store.backend = backend_of(value);
    else if (key == "--threads")
      s.store.thread_count = std::stoi(value);
    else
      fail(ErrorKind::usage, "unknown option ", key);
  }
  require(!s.store.folder.empty(), "--folder says where");
  require(s.span_bytes >= 2 * s.buffer_bytes && s.buffer_bytes > 0,
          "--mib must be at least twice --buffer-mib");
  return s;
}

double cpu_seconds() {
  rusage use{};
  ::getrusage(RUSAGE_SELF, &use);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(use.ru_utime) + seconds(use.ru_stime);
}

void run(const Settings& s) {
  cli::StoreTraffic traffic(s.store, s.span_bytes, s.buffers, s.buffer_bytes);
  const double cpu_before = cpu_seconds();
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const std::uint64_t moved = traffic.run(s.mode, [&](std::uint64_t) { return elapsed() < s.seconds; });
  const double seconds = elapsed();
  std::cout << "{\"mode\": \"" << cli::name_of(s.mode) << "\", \"backend\": \""
            << traffic.store().backend_name()
            << "\", \"registered\": " << (traffic.registered() ? "true" : "false")
            << ", \"checksums\": " << (s.store.checksums ? "true" : "false")
            << ", \"block_size\": " << s.store.block_size << ", \"queue_depth\": " << s.store.queue_depth
            << ", \"buffers\": " << s.buffers << ", \"buffer_bytes\": " << s.buffer_bytes
            << ", \"bytes\": " << moved << ", \"seconds\": " << seconds
            << ", \"gb_per_s\": " << static_cast<double>(moved) / seconds * 1e-9
            << ", \"cpu_per_wall\": " << (cpu_seconds() - cpu_before) / seconds << "}" << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "bench_store: " << error.what() << "\n";
    return 1;
  }
}
