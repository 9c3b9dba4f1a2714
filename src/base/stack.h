#pragma once

namespace sherd {

/// Makes sure of enough stack for Sherd's work whatever `ulimit -s` says: raises the calling process's limit
/// as far as it may, and what threads get that are started from now on. Throws Error{memory} where the main
/// thread is left with too little.
void require_stack();

}  // namespace sherd
