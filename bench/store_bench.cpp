// The offload store's bandwidth: whole buffers of a pool to and from a span, with the next ones always under
// way, as the optimizer's pipeline does it. Prints one JSON object. bench/store_vs_fio.sh sets it beside fio.
//
//   bench_store --folder DIR [--mode read|write|mixed] [--seconds 3] [--mib 1024] [--buffer-mib 16]
//   [--buffers 4]
//               [--block 1048576] [--depth 8] [--backend automatic|io_uring|threads] [--threads 2]
//               [--checksums]
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iostream>
#include <string>

#include "base/error.h"
#include "offload/buffer_pool.h"

namespace {

using namespace sherd;
using namespace sherd::offload;
using Clock = std::chrono::steady_clock;

struct Settings {
  StoreOptions store;
  std::string mode = "read";
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
      s.mode = value;
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
  require(s.mode == "read" || s.mode == "write" || s.mode == "mixed", "--mode is read, write or mixed");
  require(s.span_bytes >= 2 * s.buffer_bytes && s.buffer_bytes > 0,
          "--mib must be at least twice --buffer-mib");
  return s;
}

/// Transfers of a span's buffers in turn, as many under way as the pool has buffers.
class Stream {
 public:
  Stream(Store& store, BufferPool& pool, Span span) : store_(store), pool_(pool), span_(std::move(span)) {}

  void push(bool write) {
    Buffer buffer = pool_.acquire(Deadline::after_seconds(60));
    std::byte* data = buffer.data();
    if (offset_ + pool_.bytes() > span_.bytes()) offset_ = 0;
    Io io = write ? store_.write(span_, offset_, data, pool_.bytes())
                  : store_.read(span_, offset_, data, pool_.bytes());
    offset_ += pool_.bytes();
    under_way_.push_back({std::move(buffer), std::move(io)});
  }
  void pop() {
    under_way_.front().io.wait();
    under_way_.pop_front();
  }
  void drain() {
    while (!under_way_.empty()) pop();
  }
  std::size_t size() const { return under_way_.size(); }

 private:
  struct Entry {
    Buffer buffer;
    Io io;  // waited for before its buffer goes
  };
  Store& store_;
  BufferPool& pool_;
  Span span_;
  std::uint64_t offset_ = 0;
  std::deque<Entry> under_way_;
};

double cpu_seconds() {
  rusage use{};
  ::getrusage(RUSAGE_SELF, &use);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(use.ru_utime) + seconds(use.ru_stime);
}

/// Writes the whole span: blocks that were never written are quicker to read, and slower to write.
void fill(Store& store, BufferPool& pool, const Span& span) {
  Stream stream(store, pool, span);
  for (std::uint64_t at = 0; at + pool.bytes() <= span.bytes(); at += pool.bytes()) {
    if (stream.size() == static_cast<std::size_t>(pool.count())) stream.pop();
    stream.push(true);
  }
  stream.drain();
}

/// Seconds that transfers took, of which at least s.seconds were started.
double transfer(const Settings& s, Stream& reads, Stream& writes) {
  const bool mixed = s.mode == "mixed";
  const auto most = static_cast<std::size_t>(mixed ? std::max(s.buffers / 2, 1) : s.buffers);
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  for (std::size_t i = 0; elapsed() < s.seconds; ++i) {
    const bool write = s.mode == "write" || (mixed && i % 2 == 1);
    Stream& stream = write ? writes : reads;
    if (stream.size() == most) stream.pop();
    stream.push(write);
  }
  reads.drain();
  writes.drain();
  return elapsed();
}

void run(const Settings& s) {
  device::Ledger ledger;
  Store store(s.store, ledger);
  BufferPool pool(store, ledger, s.buffers, s.buffer_bytes, device::Category::workspace);
  // Mixed traffic reads one half and writes the other, as an optimizer's step does in the end.
  const std::uint64_t bytes = s.mode == "mixed" ? s.span_bytes / 2 : s.span_bytes;
  const Span first = store.reserve("first", bytes, device::Category::optimizer);
  const Span second = s.mode == "mixed" ? store.reserve("second", bytes, device::Category::optimizer) : first;
  fill(store, pool, first);
  if (s.mode == "mixed") fill(store, pool, second);
  Stream reads(store, pool, first), writes(store, pool, second);
  const std::uint64_t before = store.bytes_read() + store.bytes_written();
  const double cpu_before = cpu_seconds(), seconds = transfer(s, reads, writes);
  const std::uint64_t moved = store.bytes_read() + store.bytes_written() - before;
  std::cout << "{\"mode\": \"" << s.mode << "\", \"backend\": \"" << store.backend_name()
            << "\", \"registered\": " << (pool.registered() ? "true" : "false")
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
