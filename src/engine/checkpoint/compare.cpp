// Checkpoints' part that compares.
#include "engine/checkpoint/compare.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <span>

#include "base/text/excerpt.h"
#include "comm/gather.h"
#include "engine/checkpoint/checkpoints.h"
#include "engine/checkpoint/states.h"
#include "engine/checkpoint/writer.h"
#include "engine/report/report.h"
#include "engine/update/rules/parameter_norms.h"
#include "tensor/formats/stored_format.h"

namespace sherd::engine {
namespace {

using sharding::Piece;
using tensor::Tensor;

bool is_weight(const std::string& name) {
  return name.starts_with("fp32.") || name.starts_with("frozen.");
}

/// All tensors of a checkpoint, in the order in which the first that differs is looked for: the same on all
/// ranks, whichever of them they hold.
std::vector<std::string> names_in_order(const CheckpointReader& reader) {
  std::vector<std::string> out;
  for (const CheckpointTensor& tensor : reader.tensors())
    out.push_back(cat(tensor.kind, ".", tensor.parameter));
  std::ranges::stable_partition(out, is_weight);
  return out;
}

/// The differences that one rank, or all of them, found in one tensor.
struct Found {
  std::int64_t first = std::numeric_limits<std::int64_t>::max();
  double saved = 0, here = 0;
  std::int64_t differing = 0, elements = 0;
  std::uint64_t ulps = 0;

  void add(const Found& other) {
    if (other.first < first) first = other.first, saved = other.saved, here = other.here;
    differing += other.differing, elements += other.elements;
    ulps = std::max(ulps, other.ulps);
  }
};

/// Sums of squares of weights.
struct SquareSums {
  double errors = 0, moves = 0;
};

/// The numbers of a type, in order: neighbours are 1 apart, 0 and -0 too.
template <class Bits>
std::int64_t place_of(Bits bits) {
  constexpr Bits sign = Bits{1} << (sizeof(Bits) * 8 - 1);
  const auto magnitude = static_cast<std::int64_t>(bits & ~sign);
  return bits & sign ? -1 - magnitude : magnitude;
}

/// Compares elements that follow each other in a slice, of which `local` is the first.
template <class T, class Bits>
void compare_elements(const Tensor& saved, const Tensor& here, const tensor::Slice& slice, std::int64_t local,
                      Found& found) {
  const std::span a(saved.data<T>(), static_cast<std::size_t>(saved.numel())),
      b(here.data<T>(), static_cast<std::size_t>(here.numel()));
  found.elements += saved.numel();
  if (std::memcmp(a.data(), b.data(), a.size_bytes()) == 0) return;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto was = std::bit_cast<Bits>(a[i]), is = std::bit_cast<Bits>(b[i]);
    if (was == is) continue;
    const std::int64_t at = local + static_cast<std::int64_t>(i);
    found.add({slice.run_at(at, at + 1).logical, static_cast<double>(static_cast<float>(a[i])),
               static_cast<double>(static_cast<float>(b[i])), 1, 0,
               static_cast<std::uint64_t>(std::abs(place_of(was) - place_of(is)))});
  }
}

void compare_elements(const Tensor& saved, const Tensor& here, const tensor::Slice& slice, std::int64_t local,
                      Found& found) {
  switch (saved.dtype()) {
    case DType::f32:
      return compare_elements<float, std::uint32_t>(saved, here, slice, local, found);
    case DType::bf16:
      return compare_elements<bf16, std::uint16_t>(saved, here, slice, local, found);
    case DType::f16:
      return compare_elements<f16, std::uint16_t>(saved, here, slice, local, found);
    default:
      fail(ErrorKind::data, "states in ", name_of(saved.dtype()), " are not compared");
  }
}

/// One rank's look at what it would save.
class Comparer {
 public:
  Comparer(const CheckpointReader& reader, const CheckpointReader* before, device::Device& device)
      : reader_(reader),
        before_(before),
        device_(device),
        names_(names_in_order(reader)),
        found_(names_.size()) {
    for (std::size_t i = 0; i < names_.size(); ++i) places_[names_[i]] = i;
  }

  void look_at(const sharding::ShardedModel& model) {
    for (const FilePart part : {FilePart::trained, FilePart::frozen})
      for_each_tensor(model, part,
                      [&](const FileTensor& tensor, const SavedState& state, const Piece& piece) {
                        look_at(tensor, state, piece);
                      });
  }

  const std::vector<std::string>& names() const { return names_; }
  const std::vector<Found>& found() const { return found_; }
  const SquareSums& squares() const { return squares_; }
  /// Tensors that the checkpoint lacks.
  const std::vector<std::string>& lacking() const { return lacking_; }

 private:
  Tensor chunk(std::int64_t elements, DType dtype) const {
    return Tensor::on_host(device_, {elements}, dtype);
  }

  void look_at(const FileTensor& tensor, const SavedState& state, const Piece& piece) {
    const auto place = places_.find(tensor.name);
    if (place == places_.end()) {  // a base that it refers to has checksums
      if (!reader_.manifest().base || state.kind != "frozen") lacking_.push_back(tensor.name);
      return;
    }
    static_assert(most_at_once % tensor::double_block == 0);  // the largest
    const std::int64_t size = std::min(most_at_once, piece.count);
    const Tensor here = chunk(size, state.value_dtype()), saved = chunk(size, state.value_dtype());
    const std::size_t dot = tensor.name.find('.');
    const std::string kind = tensor.name.substr(0, dot), parameter = tensor.name.substr(dot + 1);
    for (std::int64_t done = 0; done < piece.count; done += size) {
      const std::int64_t count = std::min(size, piece.count - done), local = piece.parameter_begin + done;
      const Tensor now = here.range(0, count), then = saved.range(0, count);
      read_values(state, piece.flat_begin + done, now);
      reader_.read(kind, parameter, tensor.record.slice, local, then);
      compare_elements(then, now, tensor.record.slice, local, found_[place->second]);
      if (before_ && kind == "fp32") follow(parameter, tensor.record.slice, local, then, now);
    }
  }

  /// Live values, as read() gives those of files.
  void read_values(const SavedState& state, std::int64_t at, const Tensor& to) const {
    if (!state.in_blocks()) return state.read(at, to);
    const Tensor blocks = chunk(state.in_file(to.numel()), DType::u8);
    state.read(state.in_file(at), blocks);
    tensor::dequantize(state.format, blocks.raw(), 0,
                       std::span(to.data<float>(), static_cast<std::size_t>(to.numel())));
  }

  /// Adds the squares of how far weights went since `before`.
  void follow(const std::string& parameter, const tensor::Slice& slice, std::int64_t local,
              const Tensor& then, const Tensor& now) {
    const Tensor old = chunk(then.numel(), DType::f32);
    before_->read("fp32", parameter, slice, local, old);
    for (std::int64_t i = 0; i < then.numel(); ++i) {
      const double saved = then.data<float>()[i], error = now.data<float>()[i] - saved,
                   move = saved - old.data<float>()[i];
      squares_.errors += error * error, squares_.moves += move * move;
    }
  }

  const CheckpointReader& reader_;
  const CheckpointReader* before_;
  device::Device& device_;
  std::vector<std::string> names_, lacking_;
  std::map<std::string, std::size_t> places_;
  std::vector<Found> found_;
  SquareSums squares_;
};

/// A rank's totals, as they travel.
struct Totals {
  std::int64_t elements = 0, differing = 0, others = 0, first = 0;
  SquareSums squares;
};

template <class Value>
void add_other(std::vector<std::string>& out, const std::string& what, const Value& saved,
               const Value& here) {
  if (saved != here) out.push_back(cat(what, " was ", saved, " and is ", here));
}

std::string shown(const std::vector<std::optional<double>>& rates) {
  std::string out;
  for (const std::optional<double>& rate : rates) out += (rate ? exact(*rate) : "none") + " ";
  return out;
}

/// Compares numbers that no rounding changes; not how many micro-steps each rank made, which goes by how many
/// ranks there are.
std::vector<std::string> count_differences(const Manifest& saved, const Manifest& here) {
  std::vector<std::string> out;
  add_other(out, "the number of steps", saved.global_steps, here.global_steps);
  add_other(out, "the number of samples", saved.global_samples, here.global_samples);
  add_other(out, "the number of skipped steps", saved.skipped_steps, here.skipped_steps);
  add_other(out, "the number of updates", saved.optimizer_steps, here.optimizer_steps);
  add_other(out, "the loader's position", saved.data.position.value_or(-1), here.data.position.value_or(-1));
  return out;
}

/// Compares what else a checkpoint has beside tensors.
std::vector<std::string> other_differences(const Manifest& saved, const Manifest& here) {
  std::vector<std::string> out;
  add_other(out, "the schedule's state", excerpt(saved.scheduler), excerpt(here.scheduler));
  add_other(out, "the loss scale's state", excerpt(saved.loss_scaler), excerpt(here.loss_scaler));
  add_other(out, "the rates that were set", shown(saved.lr), shown(here.lr));
  for (const auto& [path, values] : here.step_states) {
    const auto then = saved.step_states.find(path);
    if (then == saved.step_states.end() || then->second.size() != values.size() ||
        std::memcmp(then->second.data(), values.data(), values.size() * sizeof(float)) != 0)
      out.push_back(cat("what ", path, " learns once per step is another"));
  }
  return out;
}

/// Parameters of which optimizers remember something else than the checkpoint has.
std::vector<std::string> learned_differences(const CheckpointReader& reader,
                                             const std::map<std::string, std::string>& here) {
  const std::map<std::string, std::string> saved = reader.learned();
  std::vector<std::string> out;
  for (const auto& [parameter, text] : here) {
    const auto then = saved.find(parameter);
    if (then == saved.end() || then->second != text)
      out.push_back(cat("what the optimizer remembers of ", parameter, " is another"));
  }
  return out;
}

/// The first tensor that any rank finds different, with what all of them find in it.
std::optional<TensorDifference> first_of(comm::Communicator& ranks, const Comparer& mine,
                                         std::int64_t first) {
  const auto names = static_cast<std::int64_t>(mine.names().size());
  if (first == names) return std::nullopt;
  const auto at = static_cast<std::size_t>(first);
  Found all;
  for (const Found& found : comm::gather_records(ranks, mine.found()[at], "first difference")) all.add(found);
  return TensorDifference{mine.names()[at], all.first,    all.saved, all.here,
                          all.differing,    all.elements, all.ulps};
}

/// How many tensors are there, and how many of them differ: ranks share them.
void count_tensors(comm::Communicator& ranks, device::Device& device, const Comparer& mine, Comparison& out) {
  std::vector<std::int32_t> marks;
  for (const Found& found : mine.found())
    marks.push_back(found.differing > 0 ? 2 : found.elements > 0 ? 1 : 0);
  if (marks.empty()) return;
  comm::reduce_values(ranks, device, std::span(marks), "tensors that differ", comm::ReduceOp::max);
  for (const std::int32_t mark : marks) out.tensors += mark > 0, out.differing_tensors += mark > 1;
}

}  // namespace

Comparison Checkpoints::compare(const CheckpointReader& reader, const CheckpointReader* before) {
  engine_.synchronize();
  comm::Communicator& ranks = engine_.dist_->world();
  Comparer mine(reader, before, engine_.device());
  Comparison out;
  const std::vector<Totals> all = comm::gather_results(ranks, "comparison with a checkpoint", [&] {
    mine.look_at(engine_.sharded());
    const Manifest &saved = reader.manifest(), here = describe({});
    out.others = count_differences(saved, here);
    out.counts_agree = out.others.empty();
    for (std::string& line : other_differences(saved, here)) out.others.push_back(std::move(line));
    // Each rank remembers parts of the model; the rest all ranks have alike.
    if (engine_.dist_->rank() > 0) out.others.clear();
    for (std::string& line : learned_differences(reader, engine_.optimizer_->norms().save()))
      out.others.push_back(std::move(line));
    for (const std::string& name : mine.lacking()) out.others.push_back(cat("the checkpoint has no ", name));
    Totals totals;
    for (const Found& found : mine.found())
      totals.elements += found.elements, totals.differing += found.differing;
    totals.others = std::ssize(out.others), totals.squares = mine.squares();
    totals.first = std::ranges::find_if(mine.found(), [](const Found& f) { return f.differing > 0; }) -
                   mine.found().begin();
    return totals;
  });
  SquareSums squares;
  std::int64_t first = std::ssize(mine.names());
  for (const Totals& rank : all) {
    out.elements += rank.elements, out.differing_elements += rank.differing;
    out.differing_others += rank.others;
    first = std::min(first, rank.first);
    squares.errors += rank.squares.errors, squares.moves += rank.squares.moves;
  }
  if (before) out.weights_error = squares.errors == 0 ? 0 : std::sqrt(squares.errors / squares.moves);
  count_tensors(ranks, engine_.device(), mine, out);
  if (const std::int64_t more = std::ssize(mine.names()) - out.tensors; more > 0) {
    out.others.push_back(cat("the checkpoint has ", counted(more, "tensor"), " that training does not keep"));
    ++out.differing_others;
  }
  out.first = first_of(ranks, mine, first);
  return out;
}

}  // namespace sherd::engine
