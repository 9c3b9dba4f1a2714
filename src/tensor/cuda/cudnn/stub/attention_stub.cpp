#include "tensor/cuda/attention/attention_library.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

class NoLibrary final : public AttentionLibrary {
  bool forward(const AttentionCall&) override { return false; }
  bool backward(const AttentionCall&, bool) override { return false; }
};

}  // namespace

std::shared_ptr<AttentionLibrary> make_attention_library(const device::SHERD_CUDA::Target&) {
  return std::make_shared<NoLibrary>();
}

}  // namespace sherd::tensor::SHERD_CUDA
