#pragma once

#include "engine/distributed.h"
#include "engine/token_data.h"

namespace sherd::engine {

/// Collective. Throws Error{config} on every rank where one was given another configuration or other data than rank 0, naming it
/// and the first key: processes that were started one by one train silently wrong then. What machines may differ in
/// (folders, threads, limits) is not compared. `data` may be null.
void require_same_setup(const config::Config& config, const TokenData* data, const Distributed& dist);

}  // namespace sherd::engine
