#include "base/version.h"

namespace sherd {

std::string_view version() {
  return SHERD_VERSION;
}

}  // namespace sherd
