#pragma once

#include <string>
#include <vector>

namespace sherd::config {

/// The text of an error about a configuration, with keys as these files (and overrides, as of parse_files())
/// have them: "tensor_parallel.autotp_size" for "parallel.tensor" where that key of DeepSpeed's gave the
/// value. The text itself where the files cannot be read.
std::string in_given_keys(std::string text, const std::vector<std::string>& paths,
                          const std::vector<std::string>& overrides = {});

}  // namespace sherd::config
