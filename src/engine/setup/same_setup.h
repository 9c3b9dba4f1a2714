#pragma once

#include <string>
#include <utility>
#include <vector>

#include "engine/distributed.h"
#include "engine/token_data.h"

namespace sherd::engine {

/// What must be alike on all ranks: names, as an error would call them, and values.
using Facts = std::vector<std::pair<std::string, std::string>>;

/// Collective: one small all-gather where all is alike. Throws Error{config} on every rank where one has
/// other facts than rank 0, naming that rank and the first fact: processes that were started one by one train
/// silently wrong then, or wait for each other until a deadline.
void require_same(const Facts& facts, const Distributed& dist);

/// The same of a configuration, but for what machines may differ in: folders, threads, limits.
void require_same_setup(const config::Config& config, const Distributed& dist);
/// The same of what was read of a dataset.
void require_same_data(const TokenData& data, const Distributed& dist);

}  // namespace sherd::engine
