// Checkpoints' part that keeps local ones and goes on from them.
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "comm/gather.h"
#include "engine/checkpoint/background_save.h"
#include "engine/checkpoint/checkpoints.h"
#include "engine/checkpoint/local/local_checkpoints.h"

namespace sherd::engine {

void Checkpoints::claim_local(const std::string& directory, const std::string& local_directory, bool anew) {
  finish();
  local_.reset();
  local_ = std::make_unique<LocalCheckpoints>(*engine_.dist_, engine_.sharded(), engine_.device(),
                                              local_directory, directory, anew);
  local_->frozen().refer_to(&base_);
}

/// A local checkpoint that cannot be made costs nothing but that the older one stays the newest.
void Checkpoints::give_up_local(const std::string& reason) {
  local_->forget_failed();
  if (engine_.dist_->rank() == 0)
    log_warning("no local checkpoint was made at step ", engine_.global_steps(), ": ", reason,
                ". Training goes on, and the one before it stays the newest");
}

/// A part of local saving in which ranks throw alike. A full disk or too little memory is a warning; ranks
/// that are gone end the run.
void Checkpoints::try_locally(const std::function<void()>& part) {
  try {
    part();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::io && error.kind() != ErrorKind::data && error.kind() != ErrorKind::memory)
      throw;
    give_up_local(error.what());
  }
}

void Checkpoints::begin_local(SaveAct act) {
  local_->begin(act);
  if (act.options.async && take_snapshot(act)) {
    saving_ = std::make_unique<BackgroundSave>(std::move(act), engine_.config_.parallel.timeout_seconds);
    return;
  }
  comm::gather_results(engine_.dist_->world(), "local checkpoint", [&] {
    prepare(act);
    act.file.tensors = live_tensors(engine_.sharded(), engine_.device(), FilePart::trained);
    try {
      act.write(act, [] {});
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::comm) throw;
      fail(ErrorKind::io, error.what());  // of the copies' own group, which a rank breaks that has failed
    }
    return true;
  });
  local_->publish();
}

bool Checkpoints::save_local(const SaveOptions& options) {
  require(local_ != nullptr, "claim_local_folder() comes before save_local_checkpoint()");
  if (saving_) return false;
  std::exception_ptr failed = end_failed_pass();
  SaveAct act = new_act(options);
  begin_save(act, std::move(failed), [] {});  // what training has met is an error of its own
  saving_locally_ = true;
  try_locally([&] { begin_local(std::move(act)); });
  return true;
}

NewestLocal Checkpoints::newest_local() const {
  return local_ ? local_->newest() : NewestLocal{};
}

void Checkpoints::remove_local() {
  finish();
  if (local_) local_->remove();
}

std::optional<LoadedCheckpoint> Checkpoints::load_newest(const std::string& directory) {
  require(local_ != nullptr, "claim_local_folder() comes before load_newest_checkpoint()");
  const std::exception_ptr failed = end_what_is_under_way();
  std::optional<Manifest> other;
  const auto there = comm::gather_results(engine_.dist_->world(), "newest checkpoint", [&] {
    std::error_code error;
    if (!std::filesystem::exists(std::filesystem::path(directory) / latest_pointer, error)) return false;
    other = CheckpointReader(checkpoint_folder(directory)).manifest();
    return true;
  });
  // As rank 0 sees it.
  struct Seen {
    bool there;
    std::int64_t ordinal, step;
  };
  const Seen mine{other.has_value(), other ? other->ordinal : 0, other ? other->global_steps : -1};
  const Seen first = comm::gather_records(engine_.dist_->world(), mine, "newest checkpoint")[0];
  Manifest of_files;
  of_files.ordinal = first.ordinal;
  if (const auto folder = local_->open_newest(first.there ? &of_files : nullptr))
    if (auto client = load_from(*folder, true, failed))
      return LoadedCheckpoint{std::move(*client), true, first.step};
  if (!first.there) return {};
  return LoadedCheckpoint{*load_from(checkpoint_folder(directory), false, failed), false, first.step};
}

}  // namespace sherd::engine
