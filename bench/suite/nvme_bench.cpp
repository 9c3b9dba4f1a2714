#include "bench/suite/nvme_bench.h"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "bench/suite/disk_traffic.h"
#include "engine/report/report.h"

namespace sherd::bench {
namespace fs = std::filesystem;
using offload::StoreOptions;

namespace {

constexpr std::array traffics{DiskTraffic::read, DiskTraffic::write, DiskTraffic::mixed};
constexpr double timeout_seconds = 120;

/// folder/sherd-bench, and what the store makes there, go again unless another run uses them.
class BenchFolder {
 public:
  explicit BenchFolder(const fs::path& folder) : path_(folder / "sherd-bench") {}
  ~BenchFolder() {
    std::error_code ignored;
    fs::remove(path_ / "sherd-swap", ignored);
    fs::remove(path_, ignored);
  }
  BenchFolder(const BenchFolder&) = delete;
  BenchFolder& operator=(const BenchFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

void check_folder(const NvmeBenchOptions& options) {
  std::error_code error;
  if (!fs::is_directory(options.folder, error))
    fail(ErrorKind::io, "--path: '", options.folder.string(), "' is not a folder",
         error ? cat(" (", error.message(), ")") : "", ". Give one on the disk that is to be measured");
  const fs::space_info space = fs::space(options.folder, error);
  if (!error && space.available < options.bytes + (1 << 20))
    fail(ErrorKind::io, engine::human_bytes(options.bytes), " are to be written and ",
         engine::human_bytes(space.available), " are free in '", options.folder.string(),
         "'. Choose fewer with --bytes, or another disk with --path");
}

/// How a file of about `bytes` bytes is cut for the store: buffers of whole blocks, and enough of them that
/// one of them can be waited for while the others fill the queue.
struct FileCut {
  std::size_t buffer_bytes;
  int buffers;
};
FileCut cut_for(std::uint64_t bytes, const StoreOptions& options) {
  constexpr std::uint64_t usual = std::uint64_t{16} << 20;
  const std::uint64_t block = options.block_size, depth = static_cast<std::uint64_t>(options.queue_depth);
  const std::uint64_t buffer = std::max(std::min(usual, bytes / 8) / block * block, block);
  const std::uint64_t buffers = std::max<std::uint64_t>(4, (depth * block + buffer - 1) / buffer + 1);
  require_memory(static_cast<double>(3 * buffer * buffers + depth * block),
                 "Choose a smaller --block-size or --queue-depth");
  return {buffer, static_cast<int>(buffers)};
}

/// One block size and queue depth.
class NvmeSetting {
 public:
  NvmeSetting(const StoreOptions& options, std::uint64_t bytes) : options_(options) {
    const FileCut cut = cut_for(bytes, options);
    through_store_ = std::make_unique<StoreTraffic>(options, bytes, cut.buffers, cut.buffer_bytes);
    StoreOptions raw = options;
    raw.direct = !buffered();
    raw.thread_count = std::min(options.queue_depth, 64);
    const std::string path = through_store_->store().path().string();
    const auto add = [&](std::unique_ptr<offload::IoBackend> backend) {
      if (backend)
        raw_.push_back({backend->name(), nullptr}),
            raw_.back().traffic = std::make_unique<RawTraffic>(std::move(backend), path, this->bytes(),
                                                               through_store_->memory_bytes(), raw);
    };
    std::string why;
    add(offload::make_uring_backend(raw, &why));
    add(offload::make_thread_backend(raw));
  }

  void measure(int rounds, const std::function<bool()>& stopped, const Tell& tell) {
    const auto check = [&stopped] {
      if (stopped && stopped()) fail(ErrorKind::interrupted, "interrupted");
    };
    std::vector<Contender> contenders;
    for (const DiskTraffic traffic : traffics) {
      const std::string name(name_of(traffic));
      contenders.push_back(
          {name,
           [=, this] { through_store_->run(traffic, [&](std::uint64_t moved) { return moved < bytes(); }); },
           check});
      for (const Raw& raw : raw_)
        contenders.push_back(
            {cat(name, " by ", raw.name), [&raw, traffic] { raw.traffic->run(traffic); }, check});
    }
    times_.emplace(rounds, tell);
    times_->run(contenders);
  }

  std::vector<ReportField> row(DiskTraffic traffic) const {
    const std::string name(name_of(traffic));
    const auto limit = std::min_element(raw_.begin(), raw_.end(), [&](const Raw& a, const Raw& b) {
      return times_->median_seconds(cat(name, " by ", a.name)) <
             times_->median_seconds(cat(name, " by ", b.name));
    });
    const auto amount = static_cast<double>(bytes());
    std::vector<ReportField> row{{"case", "traffic", name},
                                 {"block_size", "", static_cast<std::int64_t>(options_.block_size)},
                                 {"block", "block", engine::human_bytes(options_.block_size)},
                                 {"queue_depth", "depth", std::int64_t{options_.queue_depth}},
                                 {"backend", "backend", through_store_->store().backend_name()},
                                 {"thread_count", "threads", threads()}};
    add_rates(row, *times_, name, amount, cat(name, " by ", limit->name), amount, "gb_per_s", "GB/s");
    row.push_back({"limit_by", "limit by", limit->name});
    return row;
  }

  double mixed_rate() const { return static_cast<double>(bytes()) / times_->median_seconds("mixed"); }
  std::uint64_t bytes() const { return through_store_->bytes(); }
  bool buffered() const { return through_store_->store().backend_name().ends_with("buffered"); }

 private:
  struct Raw {
    std::string name;
    std::unique_ptr<RawTraffic> traffic;
  };
  /// Nothing where the backend has none.
  decltype(ReportField::value) threads() const {
    if (!through_store_->store().backend_name().starts_with("threads")) return {};
    return std::int64_t{options_.thread_count};
  }

  StoreOptions options_;
  std::unique_ptr<StoreTraffic> through_store_;
  std::vector<Raw> raw_;
  std::optional<Rounds> times_;
};

/// The section of a configuration that asks for this.
std::string aio_section(const StoreOptions& options) {
  const bool threads = options.backend == StoreOptions::Backend::threads;
  return cat("\"aio\": {\"block_size\": ", options.block_size, ", \"queue_depth\": ", options.queue_depth,
             threads ? cat(", \"backend\": \"threads\", \"thread_count\": ", options.thread_count) : "", "}");
}

/// All combinations, each once: io_uring has no threads. Throws Error{config} for what no store accepts.
std::vector<StoreOptions> combinations(const NvmeBenchOptions& options, const fs::path& folder) {
  const auto small = [](std::int64_t value) {
    return static_cast<int>(std::min<std::int64_t>(value, 1 << 30));
  };
  std::vector<StoreOptions> all;
  for (const StoreOptions::Backend backend : options.backends)
    for (const std::int64_t block : options.block_sizes)
      for (const std::int64_t depth : options.queue_depths)
        for (const std::int64_t threads : options.thread_counts) {
          StoreOptions store;
          store.folder = folder, store.timeout_seconds = timeout_seconds, store.backend = backend;
          store.block_size = static_cast<std::size_t>(block), store.queue_depth = small(depth);
          store.thread_count = small(threads);
          StoreOptions dry = store;
          dry.dry = true;
          device::Ledger ledger;
          const offload::Store check(dry, ledger);
          all.push_back(std::move(store));
          if (backend != StoreOptions::Backend::threads) break;
        }
  return all;
}

}  // namespace

BenchReport measure_nvme(const NvmeBenchOptions& options, const std::function<bool()>& stopped,
                         const Tell& tell) {
  check_folder(options);
  const BenchFolder work(options.folder);
  BenchReport report{"nvme",
                     cat("Offload store in ", options.folder.string()),
                     "the same requests straight to the kernel, without the store, by io_uring or by as many "
                     "threads as the queue is deep, whichever is faster",
                     {{"path", "", options.folder.string()},
                      {"bytes", "", static_cast<std::int64_t>(options.bytes)},
                      {"file", "file", engine::human_bytes(options.bytes)},
                      {"rounds", "rounds", std::int64_t{options.rounds}}},
                     {},
                     {}};
  const std::vector<StoreOptions> all = combinations(options, work.path());
  const StoreOptions* best = nullptr;
  double most = 0;
  bool buffered = false;
  for (const StoreOptions& store : all) {
    NvmeSetting setting(store, options.bytes);
    setting.measure(options.rounds, stopped, tell);
    for (const DiskTraffic traffic : traffics) report.rows.push_back(setting.row(traffic));
    buffered = setting.buffered();
    if (setting.mixed_rate() > most) most = setting.mixed_rate(), best = &store;
  }
  if (buffered)
    report.notes.emplace_back(
        "this file system refuses direct I/O: the figures are those of its page cache, not of a disk");
  if (all.size() > 1) report.notes.push_back("most mixed traffic with " + aio_section(*best));
  return report;
}

}  // namespace sherd::bench
