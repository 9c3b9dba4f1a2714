#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "bench/suite/rounds.h"

namespace sherd::bench {

/// One value of a report. Without a heading it appears in JSON only.
struct ReportField {
  std::string key;      ///< in JSON
  std::string heading;  ///< in the table
  /// Nothing where a value is not known: null, and "-" in the table.
  std::variant<std::monostate, std::string, std::int64_t, double, bool> value;
};

/// The result of a benchmark: under which conditions, one row per case, and what stands for the limit.
struct BenchReport {
  std::string bench;                           ///< "adam"
  std::string title;                           ///< one line about what was measured
  std::string limit;                           ///< tells the rows' limit, and how to read the ratio
  std::vector<ReportField> facts;              ///< conditions
  std::vector<std::vector<ReportField>> rows;  ///< the same keys in every row
  std::vector<std::string> notes;              ///< conclusions and warnings, for people
};

/// Adds a rate and its limit to a row, as every benchmark reports them: median_ms of a run that does `amount`
/// units (bytes, FLOP), the rate per 1e9 and second, limit_…, and of_limit, the median over rounds of rate by
/// limit. `limit` names the contender that does `limit_amount` units; empty: none.
void add_rates(std::vector<ReportField>& row, const Rounds& rounds, const std::string& name, double amount,
               const std::string& limit, double limit_amount, const std::string& key,
               const std::string& unit);

/// For people: title, facts, a table, the limit, notes. Ends with a newline.
std::string as_table(const BenchReport& report);
/// One object: {"bench", "limit", facts…, "cases": [rows], "notes"}, numbers with five digits. Ends with a
/// newline.
std::string as_json(const BenchReport& report);

/// Throws Error{memory} unless the machine has `bytes` to spare; `advice` is what to do about it.
void require_memory(double bytes, const std::string& advice);

}  // namespace sherd::bench
