#pragma once

#include <variant>

#include "optim/isa/tables.h"
#include "optim/quantized.h"
#include "optim/update_rule.h"

namespace sherd::optim {

/// A rule of the list.
template <class... R>
std::variant<R...> any_of(RuleList<R...>);
using AnyRule = decltype(any_of(Rules{}));

/// One update() as the loops of every device take it: which loop, with which numbers. All zero for an empty
/// span.
struct SpanPlan {
  AnyRule rule;
  float factor = 0;  ///< gradients are multiplied by it
  GradIndex grad = grad_f32;
  MasterIndex master = master_alone;
  MomentIndex moment = moment_f32;
  /// The largest bit patterns of finite fp32 weights and moments that stay finite in the formats they are
  /// kept in.
  std::uint32_t largest_weight = 0, largest_moment = 0;
  RandomKey noise{};  ///< stream of the bits that round bf16 moments in this step
};

/// Throws Error{usage} where gradients cannot be of that type.
GradIndex grad_index(DType dtype);

/// Throws Error{usage} as update() does.
SpanPlan plan_span(const SpanUpdate& span, const Hyper& hyper, std::int64_t step);

/// The loops of one instruction set among those of all.
template <class Table>
const Table& loops_of(CpuIsa isa, const Table& avx512, const Table& avx2, const Table& portable) {
  return isa == CpuIsa::avx512 ? avx512 : isa == CpuIsa::avx2 ? avx2 : portable;
}
inline const OneBitTable& one_bit_table(CpuIsa isa) {
  return loops_of(isa, avx512::one_bit_table, avx2::one_bit_table, portable::one_bit_table);
}

/// Elements [begin, end) of a span, as loops of the processor take them.
SpanChunk chunk_of(const SpanUpdate& span, const SpanPlan& plan, std::int64_t begin, std::int64_t end);

/// The map of an 8-bit code, as loops take it.
const DynamicMap& map_of(Code code);

/// update() of a span with 8-bit moments.
bool update_codes(CpuIsa isa, const SpanUpdate& span, const SpanPlan& plan, Arena& arena);

/// A span and what its plan makes of it.
struct PlannedSpan {
  SpanPlan plan;
  SpanUpdate span;
};

}  // namespace sherd::optim
