// The offload store's bandwidth: whole buffers of a pool to and from a span, with the next ones always under
// way, as the optimizer's pipeline does it. Prints one JSON object. bench/store_vs_fio.sh sets it beside fio.
#include <chrono>
#include <iostream>
#include <string>

#include "base/error.h"
#include "bench/programs/options.h"
#include "bench/programs/serving.h"
#include "bench/suite/disk_traffic.h"

namespace {

using namespace sherd;
using namespace sherd::offload;
using Clock = std::chrono::steady_clock;

struct StoreSettings {
  StoreOptions store;
  bench::DiskTraffic mode = bench::DiskTraffic::read;
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

bench::DiskTraffic traffic_of(const std::string& name) {
  for (const bench::DiskTraffic traffic :
       {bench::DiskTraffic::read, bench::DiskTraffic::write, bench::DiskTraffic::mixed})
    if (bench::name_of(traffic) == name) return traffic;
  fail(ErrorKind::usage, "--mode is read, write or mixed, not ", name);
}

StoreSettings parse(int argc, char** argv) {
  StoreSettings s;
  std::size_t mib = s.span_bytes >> 20, buffer_mib = s.buffer_bytes >> 20;
  bench::Options(
      "bench_store",
      "--folder DIR [--mode read|write|mixed] [--seconds 3] [--mib 1024] [--buffer-mib 16] [--buffers 4]\n"
      "  [--block 1048576] [--depth 8] [--backend automatic|io_uring|threads] [--threads 2] [--checksums]")
      .value("folder", s.store.folder)
      .value("mode", [&](const std::string& text) { s.mode = traffic_of(text); })
      .value("seconds", s.seconds)
      .value("mib", mib)
      .value("buffer-mib", buffer_mib)
      .value("buffers", s.buffers)
      .value("block", s.store.block_size)
      .value("depth", s.store.queue_depth)
      .value("backend", [&](const std::string& text) { s.store.backend = backend_of(text); })
      .value("threads", s.store.thread_count)
      .flag("checksums", s.store.checksums)
      .parse(argc, argv);
  s.span_bytes = mib << 20, s.buffer_bytes = buffer_mib << 20;
  require(!s.store.folder.empty(), "--folder says where");
  require(s.span_bytes >= 2 * s.buffer_bytes && s.buffer_bytes > 0,
          "--mib must be at least twice --buffer-mib");
  return s;
}

void run(const StoreSettings& s) {
  bench::StoreTraffic traffic(s.store, s.span_bytes, s.buffers, s.buffer_bytes);
  const double cpu_before = bench::processor_seconds();
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const std::uint64_t moved = traffic.run(s.mode, [&](std::uint64_t) { return elapsed() < s.seconds; });
  const double seconds = elapsed();
  std::cout << "{\"mode\": \"" << bench::name_of(s.mode) << "\", \"backend\": \""
            << traffic.store().backend_name()
            << "\", \"registered\": " << (traffic.registered() ? "true" : "false")
            << ", \"checksums\": " << (s.store.checksums ? "true" : "false")
            << ", \"block_size\": " << s.store.block_size << ", \"queue_depth\": " << s.store.queue_depth
            << ", \"buffers\": " << s.buffers << ", \"buffer_bytes\": " << s.buffer_bytes
            << ", \"bytes\": " << moved << ", \"seconds\": " << seconds
            << ", \"gb_per_s\": " << static_cast<double>(moved) / seconds * 1e-9
            << ", \"cpu_per_wall\": " << (bench::processor_seconds() - cpu_before) / seconds << "}"
            << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::guarded("bench_store", [&] { run(parse(argc, argv)); });
}
