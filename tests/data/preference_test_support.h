#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/packing/preference_samples.h"
#include "data/prepare.h"
#include "data_test_support.h"

namespace sherd::data {

inline std::string pair_line(const std::string& prompt, const std::string& chosen,
                             const std::string& rejected) {
  return nlohmann::json{{"prompt", prompt}, {"chosen", chosen}, {"rejected", rejected}}.dump() + "\n";
}
inline std::string judged_line(const std::string& prompt, const std::string& answer, bool label) {
  return nlohmann::json{{"prompt", prompt}, {"completion", answer}, {"label", label}}.dump() + "\n";
}

/// Pairs of many lengths, each with a text of its own: prompts of 2 to 8 bytes, answers of up to 11.
inline std::string many_pairs(int count) {
  std::string lines;
  for (int i = 0; i < count; ++i) {
    const auto some = [i](int times, int most) {
      return std::string(static_cast<std::size_t>(i * times % most), static_cast<char>('a' + i % 26));
    };
    lines += pair_line(std::to_string(i) + some(3, 6) + "?", some(5, 10) + "+", some(7, 12));
  }
  return lines;
}
/// The same texts, every third of them false.
inline std::string many_judged(int count) {
  std::string lines;
  for (int i = 0; i < count; ++i)
    lines += judged_line(std::to_string(i) + std::string(static_cast<std::size_t>(i * 3 % 6), '?'),
                         std::string(static_cast<std::size_t>(i * 5 % 12), static_cast<char>('a' + i % 26)),
                         i % 3 != 2);
  return lines;
}

/// Lines that are prepared into a folder, a byte being a token.
class PreferenceData : public ::testing::Test {
 protected:
  static constexpr std::int32_t padding_id = 300;  // which no text has

  PrepareOptions options_of(const std::string& lines, const std::string& name = "out") const {
    testing::write_text(folder_ / "in.jsonl", lines);
    PrepareOptions options;
    options.inputs = {(folder_ / "in.jsonl").string()};
    options.output = (folder_ / name).string();
    options.threads = 2;
    return options;
  }
  std::shared_ptr<const IndexedDataset> prepared(const std::string& lines,
                                                 const std::string& name = "out") const {
    const PrepareOptions options = options_of(lines, name);
    prepare(options);
    return IndexedDataset::open(options.output);
  }
  static std::shared_ptr<const PreferenceSamples> samples_of(std::shared_ptr<const IndexedDataset> dataset,
                                                             PreferenceOptions options) {
    options.padding = padding_id;
    const SequenceRange all{0, dataset->sequences()};
    return std::make_shared<PreferenceSamples>(std::move(dataset), all, options);
  }

  testing::TempFolder folder_;
};

/// The bytes of ids; an end of a document is $, padding and what is no target a point.
inline std::string shown_ids(const std::vector<std::int32_t>& ids) {
  std::string out;
  for (const std::int32_t id : ids) out += id == 256 ? '$' : id < 0 || id > 256 ? '.' : static_cast<char>(id);
  return out;
}

/// A text of a row.
struct SeenText {
  std::int32_t number = 0, side = 0;
  std::vector<std::int32_t> tokens, labels;
  bool operator==(const SeenText&) const = default;
};

/// The texts of a row, which is checked for all that holds of every one.
inline std::vector<SeenText> seen_in(const SampleRow& row, std::int64_t length, std::int32_t padding) {
  EXPECT_EQ(std::ssize(row.tokens), length);
  EXPECT_EQ(std::ssize(row.labels), length);
  EXPECT_TRUE(row.types.empty());
  const bool one = row.ends.empty();
  const std::vector<std::int32_t> ends = one ? std::vector{static_cast<std::int32_t>(length)} : row.ends;
  EXPECT_EQ(ends.back(), length);
  EXPECT_EQ(row.sides.size(), ends.size());
  EXPECT_EQ(row.texts.size(), ends.size());
  std::vector<SeenText> out;
  std::int32_t begin = 0;
  for (std::size_t i = 0; i < ends.size(); begin = ends[i++]) {
    EXPECT_LT(begin, ends[i]);
    const auto filling = std::count(row.tokens.begin() + begin, row.tokens.begin() + ends[i], padding);
    const auto end = one ? ends[i] - row.filling : ends[i];
    SeenText text{row.texts[i],
                  row.sides[i],
                  {row.tokens.begin() + begin, row.tokens.begin() + end},
                  {row.labels.begin() + begin, row.labels.begin() + end}};
    if (text.side != 0) {
      EXPECT_EQ(filling, one ? row.filling : 0);
      out.push_back(std::move(text));
      continue;
    }
    EXPECT_EQ(ends[i], length) << "padding comes last";
    EXPECT_EQ(text.number, -1);
    EXPECT_EQ(filling, ends[i] - begin);
    EXPECT_EQ(row.filling, filling);
  }
  EXPECT_EQ(std::count(row.tokens.begin(), row.tokens.end(), padding), row.filling);
  for (std::size_t i = 0; i < row.tokens.size(); ++i)
    if (row.tokens[i] == padding) {
      EXPECT_EQ(row.labels[i], no_label);
    }
  return out;
}

/// The first `places` places of a text that a dataset has.
inline SeenText text_in(const IndexedDataset& dataset, std::int64_t sequence, std::int64_t places) {
  const auto length = static_cast<std::size_t>(places) + 1;
  std::vector<std::int32_t> ids(length);
  std::vector<std::uint8_t> marks(length);
  dataset.read(sequence, 0, ids);
  dataset.read_mask(sequence, 0, marks);
  SeenText out{static_cast<std::int32_t>(sequence), sequence % 2 == 0 ? 1 : -1, {}, {}};
  for (std::size_t i = 0; i + 1 < length; ++i) {
    out.tokens.push_back(ids[i]);
    out.labels.push_back(marks[i + 1] ? ids[i + 1] : no_label);
  }
  return out;
}

}  // namespace sherd::data
