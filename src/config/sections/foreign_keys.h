#pragma once

#include <string_view>
#include <vector>

#include "config/reader.h"

namespace sherd::config {

struct Nothing {};

/// Keys that DeepSpeed, PEFT or AdapterHub have in `section` ("", "zero_optimization", "optimizer.params")
/// and that set nothing here: those that all types of the section have, or those of one of its types.
std::vector<Key<Nothing>> foreign_rows(std::string_view section, std::string_view type = "");

/// The same, as keys of T.
template <class T>
std::vector<Key<T>> foreign_keys(std::string_view section, std::string_view type = "") {
  std::vector<Key<T>> out;
  for (const Key<Nothing>& row : foreign_rows(section, type))
    out.push_back(lifted<T>(row, [](auto&) -> Nothing& {
      static Nothing nothing;
      return nothing;
    }));
  return out;
}

}  // namespace sherd::config
