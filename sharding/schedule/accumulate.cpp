#include "sharding/schedule/instruction.h"

namespace sherd::sharding {

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
