#include "tensor/library_version.h"

namespace sherd::tensor {

std::string cudnn_library() {
  return "";
}

}  // namespace sherd::tensor
