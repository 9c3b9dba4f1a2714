#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace sherd::testing {

/// The house's rules (docs/tour.md, "Rooms"), and a reader of #include lines that checks sources
/// against them.

/// Room → rooms that it may include directly; what those may include, it may too.
inline const std::map<std::string, std::set<std::string>>& direct_arrows() {
  static const std::map<std::string, std::set<std::string>> arrows{
      {"base", {}},
      {"config", {"base"}},
      {"device", {"base"}},
      {"tensor", {"device"}},
      {"autograd", {"tensor"}},
      {"nn", {"autograd"}},
      {"comm", {"tensor"}},
      {"data", {"tensor", "config"}},
      {"offload", {"device"}},
      {"optim", {"tensor", "config"}},
      {"sharding", {"nn", "comm", "offload", "optim", "config"}},
      {"parallel", {"nn", "comm"}},
      {"models", {"nn", "parallel", "config"}},
      {"engine", {"sharding", "parallel", "optim", "offload", "comm", "data", "config"}},
      {"planning", {"engine", "models"}},
      {"bench", {"engine", "models", "support"}},
      {"support", {"nn"}},  // of the tests, what benchmarks use of it
      {"cli", {"bench", "planning"}},
      {"sherd", {"engine", "models"}},  // the umbrella header
      {"examples", {"sherd"}},
  };
  return arrows;
}

/// A third party's headers, and the folders whose sources, not headers, may include them.
struct ThirdParty {
  std::vector<std::string> prefixes;  ///< of the path between the angle brackets
  std::vector<std::string> folders;   ///< of the including file, from the project's root
};
inline const std::vector<ThirdParty>& third_parties() {
  static const std::vector<ThirdParty> parties{
      {{"tbb/", "oneapi/tbb"}, {"src/base/"}},
      {{"oneapi/dnnl/", "dnnl"}, {"src/tensor/"}},
      {{"Eigen/", "unsupported/Eigen"},
       {"src/tensor/", "src/planning/", "models/adapters/", "models/compressed/"}},
      {{"mpi.h", "mpi-ext.h"}, {"src/comm/mpi/", "bench/programs/"}},
      {{"nlohmann/"},
       {"src/base/", "src/config/", "src/tensor/", "src/data/", "src/engine/", "src/cli/", "models/gguf/",
        "models/hub/", "bench/"}},
      {{"sentencepiece", "zlib.h", "zstd.h"}, {"src/data/"}},
      {{"pcre2", "unicode/"}, {"src/data/hugging_face/"}},
      {{"cxxopts"}, {"src/cli/"}},
      {{"liburing"}, {"offload/"}},
      {{"cuda", "cublas", "cudnn", "driver_types.h", "nvtx3/", "cub/"},
       {"src/device/cuda/", "src/tensor/cuda/", "optim/cuda/", "src/comm/cuda/", "src/comm/nccl/"}},
      {{"nccl"}, {"src/comm/nccl/"}},
      {{"omp.h"}, {"src/base/", "src/tensor/"}},
  };
  return parties;
}

/// Every room that `room` may include, itself among them.
inline std::set<std::string> reachable_from(const std::string& room) {
  std::set<std::string> reached;
  std::vector<std::string> open{room};
  while (!open.empty()) {
    const std::string next = open.back();
    open.pop_back();
    if (!reached.insert(next).second) continue;
    for (const std::string& below : direct_arrows().at(next)) open.push_back(below);
  }
  return reached;
}

/// One #include line.
struct Include {
  int line = 0;
  bool quoted = false;
  std::string path;
};

/// The #include lines of a source text, those in comments left out.
inline std::vector<Include> includes_of(const std::string& text) {
  std::vector<Include> out;
  std::istringstream in(text);
  std::string line;
  bool in_comment = false;
  for (int number = 1; std::getline(in, line); ++number) {
    std::string code;
    for (std::size_t i = 0; i < line.size(); ++i) {
      if (in_comment) {
        if (line.compare(i, 2, "*/") == 0) in_comment = false, ++i;
        continue;
      }
      if (line.compare(i, 2, "//") == 0) break;
      if (line.compare(i, 2, "/*") == 0) {
        in_comment = true, ++i;
        continue;
      }
      if (line[i] != ' ' && line[i] != '\t') code += line[i];
    }
    if (!code.starts_with("#include") || code.size() < 10) continue;
    const char open = code[8];
    const std::size_t close = code.find(open == '<' ? '>' : '"', 9);
    if ((open != '<' && open != '"') || close == std::string::npos) continue;
    out.push_back({number, open == '"', code.substr(9, close - 9)});
  }
  return out;
}

inline bool starts_with_any(const std::string& text, const std::vector<std::string>& prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](const std::string& prefix) { return text.starts_with(prefix); });
}

/// The room that a path from the project's root lies in; empty for none.
inline std::string room_of(std::string path) {
  if (path.starts_with("src/")) path.erase(0, 4);
  if (path.starts_with("sharding/parallel/")) return "parallel";  // a room within another's folder
  const std::size_t slash = path.find('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

/// True for a path with a folder of sources that only a build with CUDA compiles, or of their headers.
inline bool in_cuda_folder(const std::string& path) {
  return path.find("/cuda/") != std::string::npos || path.find("/nccl/") != std::string::npos;
}

/// Why `file` (a path from the project's root) may not include this; empty when it may.
inline std::string complaint_about(const std::string& file, const Include& include) {
  const bool header = file.ends_with(".h") || file.ends_with(".cuh");
  if (!include.quoted) {
    for (const ThirdParty& party : third_parties()) {
      if (!starts_with_any(include.path, party.prefixes)) continue;
      if (!starts_with_any(file, party.folders)) return "this third party belongs to another room";
      if (header) return "third parties appear in sources only, never in headers";
    }
    // A user's program writes <sherd/sherd.h>; inside the project that is the umbrella too.
    if (!include.path.starts_with("sherd/")) return "";
  }
  const std::string from = room_of(file), to = room_of(include.path);
  if (!direct_arrows().contains(from)) return "the folder '" + from + "' is no room of the house";
  if (!direct_arrows().contains(to)) return "includes are written from the room, \"room/file.h\"";
  if (in_cuda_folder(include.path) && from != to && !in_cuda_folder(file))
    return "only cuda/ and nccl/ folders see another room's; others go through its public headers";
  if (include.path.ends_with(".cuh") && !in_cuda_folder(file)) return "kernels are written in cuda/ folders";
  if (!reachable_from(from).contains(to)) return "no arrow leads from '" + from + "' to '" + to + "'";
  return "";
}

/// The part of a line of code that asks a device whether it is CUDA's; empty where nothing does.
inline std::string question_of_cuda(const std::string& line) {
  const std::string code = line.substr(0, line.find("//"));
  for (const char* word : {"as_cuda(", "Kind::cuda"})
    if (code.find(word) != std::string::npos) return word;
  return "";
}

/// Checks every source under `root`'s rooms. Returns one line per violation: "file:line: what: why".
inline std::vector<std::string> check_sources(const std::filesystem::path& root, int* files_seen = nullptr) {
  namespace fs = std::filesystem;
  std::vector<fs::path> tops{root / "src"};
  for (const auto& [room, below] : direct_arrows()) tops.push_back(root / room);
  std::vector<std::string> violations;
  for (const fs::path& top : tops) {
    if (!fs::is_directory(top)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(top)) {
      const std::string extension = entry.path().extension().string();
      if (!entry.is_regular_file() ||
          !std::set<std::string>{".h", ".cpp", ".cu", ".cuh", ".inc"}.contains(extension))
        continue;
      if (files_seen) ++*files_seen;
      const std::string file = fs::relative(entry.path(), root).generic_string();
      std::stringstream text;
      text << std::ifstream(entry.path()).rdbuf();
      for (const Include& include : includes_of(text.str()))
        if (const std::string why = complaint_about(file, include); !why.empty())
          violations.push_back(file + ":" + std::to_string(include.line) + ": " + include.path + ": " + why);
      if (in_cuda_folder(file)) continue;
      std::string line;
      for (int number = 1; std::getline(text, line); ++number)
        if (const std::string what = question_of_cuda(line); !what.empty())
          violations.push_back(
              file + ":" + std::to_string(number) + ": " + what +
              ": only cuda/ and nccl/ folders ask for CUDA; others ask what the device does");
    }
  }
  return violations;
}

}  // namespace sherd::testing
