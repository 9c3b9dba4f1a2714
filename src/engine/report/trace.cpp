#include "engine/report/trace.h"

#include <algorithm>

#include "base/error.h"
#include "base/files.h"
#include "comm/gather.h"
#include "engine/report/report.h"

namespace sherd::engine {
using sharding::Instruction;
namespace {

template <class Clock>
std::int64_t nanoseconds(std::chrono::time_point<Clock> time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

bool computes(Instruction::Op op) {
  return op == Instruction::Op::forward || op == Instruction::Op::backward ||
         op == Instruction::Op::backward_input || op == Instruction::Op::weight_gradients;
}

/// Where any of them is under way.
template <class Interval>
std::vector<Interval> united(std::vector<Interval> spans) {
  std::sort(spans.begin(), spans.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  std::vector<Interval> all;
  for (const Interval& span : spans)
    if (!all.empty() && span.begin <= all.back().end)
      all.back().end = std::max(all.back().end, span.end);
    else
      all.push_back(span);
  return all;
}

/// Seconds that two lists share, each in order and without overlap.
template <class Interval>
double shared(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  std::int64_t sum = 0;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    sum += std::max<std::int64_t>(0, std::min(a[i].end, b[j].end) - std::max(a[i].begin, b[j].begin));
    a[i].end < b[j].end ? ++i : ++j;
  }
  return static_cast<double>(sum) * 1e-9;
}

/// In a JSON string.
std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out;
}

std::string microseconds(std::int64_t nanoseconds) {
  return printed("%.3f", static_cast<double>(nanoseconds) * 1e-3);
}

}  // namespace

Trace::Trace(std::size_t most)
    : most_(most),
      offset_(nanoseconds(std::chrono::system_clock::now()) - nanoseconds(std::chrono::steady_clock::now())) {
}

Trace::Time Trace::at(std::chrono::steady_clock::time_point time) const {
  return nanoseconds(time) + offset_;
}

int Trace::name(std::string text) {
  const auto [it, fresh] = numbers_.try_emplace(std::move(text), static_cast<int>(names_.size()));
  if (fresh) names_.push_back(&it->first);
  return it->second;
}

bool Trace::has_room() {
  if (slices_.size() >= most_) totals_.whole = false;
  return totals_.whole;
}

void Trace::begin(const sharding::Instruction& instruction) {
  instruction_ = {name(std::string(sharding::name_of(instruction.op))), at(std::chrono::steady_clock::now()),
                  0, instruction.micro_batch, instruction.chunk};
  op_ = instruction.op;
  if (!in_step_) step_begin_ = instruction_.begin;
  in_step_ = true;
}

void Trace::end(const sharding::Instruction& instruction, double waited) {
  instruction_.end = at(std::chrono::steady_clock::now());
  if (!has_room()) return op_.reset();
  const Time wait = std::min(static_cast<Time>(waited * 1e9), instruction_.end - instruction_.begin);
  if (wait > 0) {
    const Time until = instruction_.begin + wait;
    slices_.push_back({name("wait for stage"), instruction_.begin, until});
    add_wait(instruction_.begin, until, totals_.stages);
  }
  slices_.push_back(instruction_);
  const double seconds = static_cast<double>(instruction_.end - instruction_.begin) * 1e-9;
  totals_.instructions[static_cast<std::size_t>(instruction.op)] += seconds;
  if (computes(instruction.op)) {
    computing_.push_back({instruction_.begin, instruction_.end});
    totals_.computing += seconds;
  }
  op_.reset();
  if (instruction.op != Instruction::Op::update) return;
  steps_.push_back({step_begin_, instruction_.end});
  totals_.steps += static_cast<double>(instruction_.end - step_begin_) * 1e-9;
  ++totals_.step_count;
  in_step_ = false;
}

void Trace::begin_range(std::string_view what, std::string_view of) {
  std::string text(what);
  if (!of.empty()) (text += ' ') += of;
  open_.push_back({name(std::move(text)), at(std::chrono::steady_clock::now())});
}

void Trace::end_range() {
  if (open_.empty()) return;  // one that began before
  TimedRange slice = open_.back();
  open_.pop_back();
  slice.end = at(std::chrono::steady_clock::now());
  if (!has_room()) return;
  const std::string& text = *names_[static_cast<std::size_t>(slice.name)];
  if (text.starts_with("wait for read of") || text.starts_with("wait for write of"))
    add_wait(slice.begin, slice.end, totals_.storage);
  slices_.push_back(slice);
}

void Trace::add_wait(Time begin, Time end, double& total) {
  const double seconds = static_cast<double>(end - begin) * 1e-9;
  total += seconds;
  if (!op_) return;
  totals_.instructions[static_cast<std::size_t>(*op_)] -= seconds;
  if (!computes(*op_)) return;
  totals_.computing -= seconds;
  waits_.push_back({begin, end});
}

void Trace::transferred(const offload::TransferTime& time) {
  std::lock_guard lock(mutex_);
  if (transfers_.size() < most_)
    transfers_.push_back({time.write, time.bytes, at(time.begin), at(time.end)});
  else
    transfers_left_out_ = true;
}

TraceTotals Trace::totals() const {
  TraceTotals totals = totals_;
  std::vector<Interval> io;
  {
    std::lock_guard lock(mutex_);
    for (const NvmeTransfer& transfer : transfers_) io.push_back({transfer.begin, transfer.end});
    totals.whole = totals.whole && !transfers_left_out_;
  }
  io = united(std::move(io));
  totals.io = shared(io, steps_);
  totals.hidden_io = shared(io, computing_) - shared(io, united(waits_));
  return totals;
}

std::string Trace::events(int rank) const {
  std::string text = cat(R"({"ph":"M","name":"process_name","pid":)", rank, R"(,"args":{"name":"rank )", rank,
                         R"("}},)", "\n", R"({"ph":"M","name":"thread_name","pid":)", rank,
                         R"(,"tid":0,"args":{"name":"instructions"}})");
  for (const TimedRange& slice : slices_) {
    text += cat(",\n", R"({"ph":"X","name":")", escaped(*names_[static_cast<std::size_t>(slice.name)]),
                R"(","pid":)", rank, R"(,"tid":0,"ts":)", microseconds(slice.begin), R"(,"dur":)",
                microseconds(slice.end - slice.begin));
    if (slice.chunk >= 0)
      text += cat(R"(,"cat":"instruction","args":{"micro_batch":)", slice.micro_batch, R"(,"chunk":)",
                  slice.chunk, "}");
    text += "}";
  }
  std::lock_guard lock(mutex_);
  std::int64_t id = 0;
  for (const NvmeTransfer& transfer : transfers_) {
    const std::string common = cat(R"("cat":"NVMe","name":")", transfer.write ? "write" : "read",
                                   R"(","pid":)", rank, R"(,"tid":1,"id":)", id++, R"(,"ts":)");
    text += cat(",\n", R"({"ph":"b",)", common, microseconds(transfer.begin), R"(,"args":{"bytes":)",
                transfer.bytes, "}},\n", R"({"ph":"e",)", common, microseconds(transfer.end), "}");
  }
  return text;
}

void write_trace(const Distributed& dist, const Trace& trace, const std::string& path) {
  constexpr std::size_t piece = 1 << 20;  // of each rank at a time, as all ranks get all of what is gathered
  const std::string mine = trace.events(dist.rank());
  const std::vector<std::size_t> sizes = comm::gather_records(dist.world(), mine.size(), "size of the trace");
  const std::size_t most = *std::max_element(sizes.begin(), sizes.end());
  std::vector<std::string> texts(sizes.size());
  for (std::size_t begin = 0; begin < most; begin += piece) {
    const std::size_t count = std::min(piece, most - begin);
    std::string part = begin < mine.size() ? mine.substr(begin, count) : "";
    part.resize(count, ' ');
    const std::vector<char> parts = comm::gather_records(dist.world(), std::span<const char>(part), "trace");
    for (std::size_t rank = 0; dist.rank() == 0 && rank < sizes.size(); ++rank)
      texts[rank].append(parts.data() + rank * count, count);
  }
  comm::gather_results(dist.world(), "whether the trace was written", [&] {
    if (dist.rank() != 0) return true;
    std::string text = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
    for (std::size_t rank = 0; rank < texts.size(); ++rank)
      (text += rank > 0 ? ",\n" : "").append(texts[rank], 0, sizes[rank]);
    write_file_atomically(path, text + "\n]}\n");
    return true;
  });
}

}  // namespace sherd::engine
