#include "tensor/library_version.h"

namespace sherd::tensor {

std::string cudnn_version() {
  return "";
}

}  // namespace sherd::tensor
