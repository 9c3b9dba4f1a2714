#include "sharding/instruction.h"

#include <array>

namespace sherd::sharding {

std::string_view name_of(Instruction::Op op) {
  static constexpr std::array<std::string_view, 16> names = {
      "update_chunk",     "gather",          "release",        "receive_activation",
      "forward",          "send_activation", "share_loss",     "begin_update",
      "receive_gradient", "backward",        "backward_input", "send_gradient",
      "weight_gradients", "reduce",          "count",          "update"};
  return names.at(static_cast<std::size_t>(op));
}

std::vector<Instruction> accumulate(std::int64_t micro_batch, bool ends_step, bool early_update) {
  using Op = Instruction::Op;
  std::vector<Instruction> list{{Op::forward, micro_batch}};
  if (ends_step) list.push_back({Op::share_loss, micro_batch});
  if (ends_step && early_update) list.push_back({Op::begin_update, micro_batch});
  for (const Op op : {Op::backward, Op::reduce, Op::count}) list.push_back({op, micro_batch});
  if (ends_step) list.push_back({Op::update, micro_batch});
  return list;
}

}  // namespace sherd::sharding
