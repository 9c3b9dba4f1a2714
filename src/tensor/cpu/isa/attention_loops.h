#pragma once

#include "tensor/cpu/isa/attention_backward.h"
#include "tensor/cpu/isa/attention_forward.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

template <class Dot>
constexpr AttentionOps attention_ops() {
  using Forward = AttentionForward<Dot>;
  using Backward = AttentionBackward<Dot>;
  return {Forward::scratch_bytes, Backward::scratch_bytes, Forward::run, Backward::run, Backward::store_rows};
}

}  // namespace
}  // namespace sherd::tensor::cpu::SHERD_ISA
