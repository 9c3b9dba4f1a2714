#include "cli/config_files.h"

#include "base/error.h"
#include "cli/weights.h"
#include "config/given_keys.h"

namespace sherd::cli {

config::Config ConfigFiles::parse(const std::vector<std::string>& more) const {
  std::vector<std::string> all = overrides;
  all.insert(all.end(), more.begin(), more.end());
  // A run that is resumed needs the folders no more from which it began.
  const auto of = [&](std::string (*section)(const std::string&)) {
    return [this, section](const std::string& init_from, const std::string& save_dir) {
      return section(resumes && holds_checkpoints(save_dir) ? save_dir : init_from);
    };
  };
  return config::parse_files(paths, all, of(sections_of), of(adapter_section));
}

void ConfigFiles::in_their_words(const std::function<void()>& run) const {
  try {
    run();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::config) throw;
    throw Error(error.kind(), config::in_given_keys(error.what(), paths, overrides));
  }
}

}  // namespace sherd::cli
