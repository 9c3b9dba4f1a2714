// Ranks that were started with different configurations or data are told, whichever way they came to an
// engine.
#include "engine/setup/process_grid.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/initialize.h"
#include "support/odd_models.h"

namespace sherd::test {
namespace {

using ::testing::HasSubstr;

config::Config with(const std::string& text) {
  return config::parse_text(R"({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, )" +
                            text + "}");
}

/// The error that each of three ranks throws in `body`.
std::vector<std::string> told(const std::function<void(const DistributedPtr&)>& body) {
  std::vector<std::string> errors(3);
  launch_ranks(3, [&](const DistributedPtr& dist) {
    try {
      body(dist);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::config) << error.what();
      errors[static_cast<std::size_t>(dist->rank())] = error.what();
    }
  });
  return errors;
}

void expect_all(const std::vector<std::string>& errors, const std::string& part) {
  for (const std::string& error : errors) EXPECT_THAT(error, HasSubstr(part));
}

TEST(SameSetup, an_engine_names_the_rank_and_the_key_that_differ) {
  const auto engine = [](const std::string& others, const std::string& last) {
    return told([&](const DistributedPtr& dist) {
      Engine(dist, std::make_shared<Odd>(), with(dist->rank() == 2 ? last : others));
    });
  };
  expect_all(engine(R"("gradient_clipping": 1)", R"("gradient_clipping": 2)"),
             "rank 2 was started with another gradient_clipping (here ");
  expect_all(engine(R"("bf16": {"enabled": true})", R"("fp16": {"enabled": true})"),
             "rank 2 was started with another ");
  // Alike, or of a machine.
  for (const char* last :
       {R"("device": {"threads_per_rank": 1}, "log_level": "error")",
        R"("device": {"threads_per_rank": 1, "host_memory_limit": "8GB"}, "log_level": "warning")"})
    for (const std::string& error :
         engine(R"("device": {"threads_per_rank": 1}, "log_level": "error")", last))
      EXPECT_EQ(error, "");
}

TEST(SameSetup, initialize_compares_the_number_of_samples) {
  const auto start = [](std::int64_t samples_of_the_first) {
    return told([&](const DistributedPtr& dist) {
      const auto data = data::make_dataset(dist->rank() == 0 ? samples_of_the_first : 8,
                                           [](std::int64_t) { return tensor::Batch(); });
      initialize({.dist = dist,
                  .model = std::make_shared<Odd>(),
                  .config = with(R"("log_level": "error")"),
                  .training_data = data});
    });
  };
  expect_all(start(12), "rank 1 was started with another number of training samples (here ");
  for (const std::string& error : start(8)) EXPECT_EQ(error, "");
}

TEST(SameSetup, what_is_alike_costs_one_exchange) {
  launch_ranks(2, [](const DistributedPtr& dist) {
    dist->world().reset_traffic();
    engine::require_same({{"a", "1"}, {"b", "2"}}, *dist);
    EXPECT_EQ(dist->world().traffic().scalars, 16u) << "two hashes";
  });
}

TEST(SameSetup, another_set_of_names_is_told) {
  const auto errors = told([](const DistributedPtr& dist) {
    engine::require_same({{dist->rank() == 1 ? "a" : "b", "1"}}, *dist);
  });
  expect_all(errors, "rank 1 was started with another set of keys than rank 0");
}

}  // namespace
}  // namespace sherd::test
