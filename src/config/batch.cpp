#include <initializer_list>

#include "base/text/excerpt.h"
#include "config/config.h"

namespace sherd::config {
namespace {

constexpr const char* tb_key = "train_batch_size";
constexpr const char* mb_key = "train_micro_batch_size_per_gpu";
constexpr const char* gas_key = "gradient_accumulation_steps";

std::string shown(std::int64_t number) {
  return number > 0 ? std::to_string(number) : "not given";
}

constexpr std::int64_t limit = std::int64_t{1} << 31;

// The product; of more than any run has, the limit.
std::int64_t product(std::initializer_list<std::int64_t> numbers) {
  std::int64_t out = 1;
  for (const std::int64_t number : numbers) {
    if (number > 0 && out > limit / number) return limit;
    out *= number;
  }
  return out;
}

std::string told(std::int64_t samples) {
  return samples < limit ? std::to_string(samples) : "2^31 or more";
}

// The nearest combination that multiplies: keeps the batch near what was asked and the micro-batch as it is.
std::string suggestion(const Batch& given, const Batch& filled, std::int64_t ranks) {
  const std::int64_t micro =
      std::max<std::int64_t>(1, given.micro_batch_size ? given.micro_batch_size : filled.micro_batch_size);
  const std::int64_t accumulate =
      given.gradient_accumulation_steps
          ? given.gradient_accumulation_steps
          : std::max<std::int64_t>(1, (filled.train_batch_size + micro * ranks / 2) / (micro * ranks));
  const std::int64_t samples = product({micro, accumulate, ranks});
  if (samples >= limit) return "lower them";
  return cat("set ", tb_key, " to ", samples, " (", mb_key, " ", micro, ", ", gas_key, " ", accumulate,
             "), or change one of the others");
}

/// The samples that the sizes make, where they make any.
std::string sizes(const Batch& filled, std::int64_t ranks) {
  if (filled.micro_batch_size == 0 || filled.gradient_accumulation_steps == 0)
    return "that is less than one sample for each of them";
  return cat(filled.micro_batch_size, " x ", filled.gradient_accumulation_steps, " x ", ranks, " = ",
             told(product({filled.micro_batch_size, filled.gradient_accumulation_steps, ranks})),
             " samples per step");
}

[[noreturn]] void mismatch(const Batch& given, const Batch& filled, std::int64_t ranks) {
  fail(ErrorKind::config, tb_key, " ", shown(given.train_batch_size), ", ", mb_key, " ",
       shown(given.micro_batch_size), ", ", gas_key, " ", shown(given.gradient_accumulation_steps), " and ",
       counted(ranks, "data-parallel rank"), " do not fit: ", sizes(filled, ranks), "; ",
       suggestion(given, filled, ranks));
}

Batch infer(const Batch& given, std::int64_t ranks) {
  Batch out = given;
  std::int64_t &tb = out.train_batch_size, &mb = out.micro_batch_size, &gas = out.gradient_accumulation_steps;
  if (tb > 0 && mb > 0) {
    if (gas == 0) gas = tb / mb / ranks;
  } else if (tb > 0) {
    if (gas == 0) gas = 1;
    mb = tb / ranks / gas;
  } else if (mb > 0) {
    if (gas == 0) gas = 1;
    tb = product({mb, gas, ranks});
  }
  return out;
}

}  // namespace

Batch resolve_batch(const Config& config, int dp_world) {
  require(dp_world >= 1, "resolve_batch: ", dp_world, " data-parallel ranks");
  const Batch& given = config.batch;
  if (given.train_batch_size <= 0 && given.micro_batch_size <= 0)
    fail(ErrorKind::config, "the configuration gives neither ", tb_key, " nor ", mb_key,
         "; give one of them");
  for (const std::int64_t number :
       {given.train_batch_size, given.micro_batch_size, given.gradient_accumulation_steps})
    if (number >= limit) fail(ErrorKind::config, "a batch size of ", number, " is beyond 2^31");
  const Batch out = infer(given, dp_world);
  if (out.train_batch_size >= limit)
    fail(ErrorKind::config, mb_key, " ", given.micro_batch_size, ", ", gas_key, " ",
         out.gradient_accumulation_steps, " and ", counted(dp_world, "data-parallel rank"),
         " make 2^31 samples per step or more; lower them");
  if (out.micro_batch_size <= 0 || out.gradient_accumulation_steps <= 0 ||
      out.train_batch_size / out.micro_batch_size / out.gradient_accumulation_steps != dp_world ||
      out.train_batch_size != product({out.micro_batch_size, out.gradient_accumulation_steps, dp_world}))
    mismatch(given, out, dp_world);
  const bool packed = config.data && config.data->packing == SamplePacking::documents;
  if (config.learns_preferences() && config.objective() != Objective::kto && !packed &&
      out.micro_batch_size % 2 != 0)
    fail(ErrorKind::config, "a pair is two rows of a micro-batch, whose ", mb_key, " is ",
         out.micro_batch_size, ": make it even, or set data.packing to \"documents\"");
  return out;
}

}  // namespace sherd::config
