#include "engine/checkpoint/save_act.h"

#include "base/files.h"
#include "engine/checkpoint/checkpoint.h"

namespace sherd::engine {

void SaveAct::publish(std::span<const FileChecksum> sums) {
  for (std::size_t of = 0; of < sums.size(); ++of) manifest.files[rank_file(static_cast<int>(of))] = sums[of];
  write_tokenizer(partial, tokens.get(), manifest);
  if (files) write_files(partial, *files, manifest);
  manifest.ordinal = folder->next_ordinal();
  write_file_atomically(partial / "manifest.json", manifest.to_json());
  folder->publish(partial, tag, options.best);
  if (options.keep_last > 0)
    remove_old_checkpoints(folder->path(), static_cast<std::size_t>(options.keep_last), tag);
}

}  // namespace sherd::engine
