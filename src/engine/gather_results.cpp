#include "engine/gather_results.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace sherd::engine {

PartOutcome PartOutcome::of(const std::exception_ptr& error) noexcept {
  PartOutcome out;
  out.failed = true;
  const auto say = [&](const char* what) {
    std::memcpy(out.message, what, std::min(std::strlen(what), sizeof out.message - 1));
  };
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    out.kind = known.kind();
    say(known.what());
  } catch (const std::bad_alloc& memory) {
    out.kind = ErrorKind::memory;
    say(memory.what());
  } catch (const std::exception& other) {
    say(other.what());
  } catch (...) {
    say("an exception of unknown type");
  }
  return out;
}

void PartOutcome::rethrow(std::size_t rank) const {
  fail(kind, "rank ", rank, " failed: ", message);
}

}  // namespace sherd::engine
