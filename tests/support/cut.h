#pragma once

#include <string>

#include "comm/process_groups.h"
#include "sharding/parallel/layout.h"

namespace sherd::test {

/// How a model is cut over as many ranks as it needs.
struct Cut {
  int tensor = 1, context = 1;
  bool sequence = true;
  ContextMethod method = ContextMethod::ring;

  int ranks() const { return tensor * context; }
  comm::Grid grid() const { return comm::Grid(ranks(), {.tensor = tensor, .context = context}); }
  parallel::Layout layout(const comm::ProcessGroups& groups) const {
    return {&groups.group(comm::Axis::tensor), &groups.group(comm::Axis::context), sequence, method};
  }
  /// A name for a test, e.g. "t2c4_ulysses".
  std::string str() const {
    return "t" + std::to_string(tensor) + "c" + std::to_string(context) +
           (tensor > 1 && !sequence ? "_whole" : "") +
           (context > 1 ? method == ContextMethod::ring ? "_ring" : "_ulysses" : "");
  }
};

}  // namespace sherd::test
