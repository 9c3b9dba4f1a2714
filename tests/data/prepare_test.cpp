#include "data/prepare.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <thread>

#include "data/tokenizer.h"
#include "data_test_support.h"
#include "sample_text.h"
#include "support/expect_error.h"

namespace sherd::data {
namespace {

using testing::expect_error;
using testing::read_text;
using testing::TempFolder;
using testing::write_text;

class Preparing : public ::testing::Test {
 protected:
  std::string input(const std::string& name, const std::string& content) const {
    write_text(folder_ / name, content);
    return (folder_ / name).string();
  }
  PrepareOptions options(std::vector<std::string> inputs, DocumentRule rule = DocumentRule::blank) const {
    PrepareOptions result;
    result.inputs = std::move(inputs);
    result.output = prefix_;
    result.document = rule;
    result.threads = 2;
    return result;
  }
  /// The documents of the dataset, decoded; an end-of-document id must end each and stand nowhere else.
  std::vector<std::string> documents() const {
    const auto dataset = IndexedDataset::open(prefix_);
    const auto tokenizer = make_tokenizer(read_dataset_info(prefix_)->tokenizer);
    std::vector<std::string> texts;
    for (std::int64_t d = 0; d < dataset->documents(); ++d) {
      std::vector<std::int32_t> ids;
      for (std::int64_t s = dataset->document_begin(d); s < dataset->document_begin(d + 1); ++s) {
        const std::size_t at = ids.size();
        ids.resize(at + static_cast<std::size_t>(dataset->length(s)));
        dataset->read(s, 0, std::span(ids).subspan(at));
      }
      EXPECT_EQ(std::count(ids.begin(), ids.end(), tokenizer->end_of_document()), 1);
      EXPECT_EQ(ids.back(), tokenizer->end_of_document());
      texts.push_back(tokenizer->decode(ids));
    }
    return texts;
  }
  std::vector<std::string> prepared(const std::string& content, DocumentRule rule,
                                    const std::string& name = "in.txt") {
    prepare(options({input(name, content)}, rule));
    return documents();
  }

  TempFolder folder_;
  std::string prefix_ = (folder_ / "out").string();
};

using Texts = std::vector<std::string>;

TEST_F(Preparing, SplitsAtBlankLines) {
  EXPECT_EQ(prepared("one\ntwo\n\nthree\n \t\n\nfour", DocumentRule::blank),
            (Texts{"one\ntwo", "three", "four"}));
  EXPECT_EQ(prepared("\n\n one\r\ntwo\r\n\r\nthree\r\n", DocumentRule::blank), (Texts{" one\ntwo", "three"}));
}

TEST_F(Preparing, SplitsAtLines) {
  EXPECT_EQ(prepared("one\r\n\ntwo\n \nthree", DocumentRule::line), (Texts{"one", "two", "three"}));
}

TEST_F(Preparing, TakesWholeFiles) {
  prepare(options({input("a", "one\n\ntwo\n"), input("b", " \n\n"), input("c", ""), input("d", "three")},
                  DocumentRule::file));
  EXPECT_EQ(documents(), (Texts{"one\n\ntwo\n", "three"}));
}

TEST_F(Preparing, EndsADocumentWithItsFile) {
  prepare(options({input("a", "one"), input("b", "two")}));
  EXPECT_EQ(documents(), (Texts{"one", "two"}));
}

TEST_F(Preparing, ReadsJsonLines) {
  EXPECT_EQ(prepared("{\"text\": \"one\\n\\u00e9\", \"n\": 1}\n\n{\"text\": \"two\"}\r\n{\"text\": \"\"}",
                     DocumentRule::blank, "in.jsonl"),
            (Texts{"one\n\xc3\xa9", "two"}));
  PrepareOptions named = options({input("other.jsonl", "{\"body\": \"x\"}\n")});
  named.json_field = "body";
  prepare(named);
  EXPECT_EQ(documents(), (Texts{"x"}));
}

TEST_F(Preparing, NamesTheBadJsonLine) {
  const auto expect = [&](const std::string& content, const std::string& part) {
    expect_error(ErrorKind::data, part, [&] { prepare(options({input("bad.jsonl", content)})); });
    EXPECT_FALSE(std::filesystem::exists(index_path(prefix_)));
    EXPECT_FALSE(std::filesystem::exists(bin_path(prefix_)));
  };
  expect("{\"text\": \"a\"}\n\n{\"text\": ", "bad.jsonl', line 3, is no JSON");
  expect("{\"text\": \"a\"}\n{\"text\": 5}", "line 2, has no string 'text'");
  expect("[1]\n{}", "line 1, is no JSON object");
  expect("{\"body\": \"a\"}", "line 1, has no string 'text'");
  expect("{\"text\": \"a\xff\"}", "line 1, is no JSON");
}

TEST_F(Preparing, DropsAByteOrderMarkAndRefusesUtf16) {
  EXPECT_EQ(prepared("\xef\xbb\xbfone", DocumentRule::blank), (Texts{"one"}));
  expect_error(ErrorKind::data, "is UTF-16",
               [&] { prepared(std::string("\xff\xfeo\0", 4), DocumentRule::blank); });
}

TEST_F(Preparing, RefusesFilesThatAreNoText) {
  using namespace std::string_literals;
  const auto expect = [&](const std::string& content, const std::string& part) {
    for (const char* name : {"in.txt", "in.jsonl"}) {
      expect_error(ErrorKind::data, part, [&] { prepared(content, DocumentRule::blank, name); });
      expect_error(ErrorKind::data, (folder_ / name).string(),
                   [&] { prepared(content, DocumentRule::blank, name); });
    }
    EXPECT_FALSE(std::filesystem::exists(bin_path(prefix_)));
  };
  expect("\xfd\x37zXZ\0\0\x04"s,
         "is an xz file, and what is read here is UTF-8 text and JSON lines; unpack it: unxz -k '");
  expect("\x04\x22\x4d\x18\x64", "is an lz4 file");
  expect("BZh91AY&SY\x01\x02", "is a bzip2 file");
  expect("PK\3\4\x14\0"s, "is a zip archive");
  expect("PAR1\x15\x04\x15\0"s, "is a Parquet file");
  expect("ARROW1\0\0"s, "is an Arrow file");
  expect("notes.txt" + std::string(248, '\0') + "ustar  \0"s, "is a tar archive");
  expect("MMIDIDX\0\0\1"s, "is prepared already");
  expect("%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj", "is a PDF document");
  expect("text, and then\0no text"s, "is binary, as it has NUL bytes");
  expect("o\0n\0e\0"s, "is binary");
  // Long inputs are not read first.
  input("a.txt", std::string(9 << 20, 'x'));
  PrepareOptions both = options({(folder_ / "a.txt").string(), input("b.xz", "\xfd\x37zXZ\0\0\x04"s)});
  both.progress = [](const PrepareProgress&) { ADD_FAILURE() << "began to encode"; };
  expect_error(ErrorKind::data, "b.xz' is an xz file", [&] { prepare(both); });
}

TEST_F(Preparing, TakesTextThatBeginsLikeSomethingElse) {
  for (const std::string text : {"PAR1 is a gene.", "ARROW1 flew.", "BZh9 was written on the wall.",
                                 "%PDF-1.4 is a line of text\nhere", "MMIDIDX comes first in an index.",
                                 "PK is short for Peace Keeper."})
    EXPECT_EQ(prepared(text, DocumentRule::file), Texts{text});
  const std::string late = std::string(9000, 'x') + '\0';  // a stray NUL far into a text
  EXPECT_EQ(prepared(late, DocumentRule::file), Texts{late});
}

TEST_F(Preparing, RefusesJsonThatIsNotInLines) {
  const auto expect = [&](const std::string& name, const std::string& content, const std::string& part) {
    expect_error(ErrorKind::data, name + "' " + part, [&] { prepared(content, DocumentRule::blank, name); });
  };
  const std::string objects = R"({"text": "one"},)"
                              "\n"
                              R"({"text": "[two]"})";
  for (const char* name : {"in.json", "in.txt", "in.jsonl"}) {
    expect(name, "[" + objects + "]\n", "is a JSON array, and what is read here is JSON lines");
    expect(name, "\xef\xbb\xbf \n[\n" + objects + "\n]", "is a JSON array");
    expect(name, "[]", "is a JSON array");
    expect(name, "{\n \"text\": \"one\"\n}\n", "is JSON whose objects go over several lines");
    expect(name, "{\n \"text\": \"one\"\n}\n{\n \"text\": \"two\"\n}\n", "is JSON whose objects go over");
  }
  expect("in.json", "[1]",
         "is a JSON array, and what is read here is JSON lines, one object in each; make such a file: jq -c "
         "'.[]' '");
  for (const char* name : {"in.json", "in.txt"}) {
    expect(name, "{\"text\": \"one\"}",
           "holds JSON lines, which are read as such only from a file whose name ends in .jsonl");
    expect(name, "{\"text\": \"one\"}\n\n{\"text\": \"two\"}\n", "holds JSON lines");
  }
}

TEST_F(Preparing, RefusesJsonOfAnySize) {
  const auto many = [](const std::string& one) {  // more of it than a block
    std::string out;
    while (out.size() < (5u << 18)) out += one;
    return out;
  };
  const std::string items = many("{\"text\": \"caf\xc3\xa9, 1.5\", \"n\": -12.5e3, \"ok\": true},\n"),
                    lines = many("{\"text\": \"caf\xc3\xa9\"}\n"), numbers = many("1, 2, 3, "),
                    words = many("caf\xc3\xa9 word ");
  for (std::size_t shift = 0; shift < 60; ++shift)  // the first block ends anywhere in an item
    expect_error(ErrorKind::data, "is a JSON array",
                 [&] { prepared("[" + std::string(shift, ' ') + items, DocumentRule::blank); });
  expect_error(ErrorKind::data, "is a JSON array",
               [&] { prepared("[" + items + "1]", DocumentRule::blank, "in.jsonl"); });
  expect_error(ErrorKind::data, "holds JSON lines", [&] { prepared(lines, DocumentRule::blank); });
  expect_error(ErrorKind::data, "go over several lines",
               [&] { prepared("{\n\"a\": [" + numbers + "1]}", DocumentRule::blank, "in.jsonl"); });
  prepared(lines, DocumentRule::blank, "in.jsonl");
  EXPECT_EQ(prepared("{\"text\": \"" + words + "\"}\n", DocumentRule::blank, "in.jsonl").size(), 1u);
}

TEST_F(Preparing, TakesTextThatBeginsLikeJson) {
  for (const std::string text :
       {"[Illustration: a ship]\n\nIt was a dark night.", "[1] Smith, 1998.\n[2] Jones, 2001.\n",
        "[\"Hello,\" he said, and left.", "[1, 2] is the interval.", "[1]\n[2]\n[3]", "[", "{", "[1, 2",
        "{sic} he wrote", "{\"a\": 1} is an object of JSON.", "{{Infobox | name = x}}\ntext",
        "{\n  int x;\n}"})
    EXPECT_EQ(prepared(text, DocumentRule::file), Texts{text});
  std::string long_prose = "[Note] ";
  while (long_prose.size() < (2u << 20)) long_prose += "[1, 2] and so on. ";
  EXPECT_EQ(prepared(long_prose, DocumentRule::file), Texts{long_prose});
}

TEST_F(Preparing, KeepsBytesThatAreNoUtf8) {
  const auto report = prepare(options({input("in", "caf\xe9 \xff\n\nna\xc3\xafve")}));
  EXPECT_EQ(report.invalid_bytes, 2);
  EXPECT_TRUE(report.lossless);
  EXPECT_EQ(documents(), (Texts{"caf\xe9 \xff", "na\xc3\xafve"}));
}

TEST_F(Preparing, RefusesNothingAndMissingThings) {
  expect_error(ErrorKind::io, "no-such.txt", [&] { prepare(options({(folder_ / "no-such.txt").string()})); });
  expect_error(ErrorKind::usage, "no input files", [&] { prepare(options({})); });
  expect_error(ErrorKind::data, "holds no text", [&] { prepare(options({input("empty", "")})); });
  expect_error(ErrorKind::data, "hold no text", [&] {
    prepare(options({input("a", "\n \n"), input("b", "")}));
  });
  std::filesystem::create_directory(folder_ / "hollow");
  expect_error(ErrorKind::io, "holds no files", [&] { prepare(options({(folder_ / "hollow").string()})); });
  PrepareOptions nowhere = options({input("in", "text")});
  nowhere.output = (folder_ / "in/out").string();  // a file is where the folder should be
  expect_error(ErrorKind::io, "cannot be made", [&] { prepare(nowhere); });
  nowhere.output = (folder_ / "new/folder/out").string();
  prepare(nowhere);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "new/folder/out.idx"));
  PrepareOptions unknown = options({input("in", "text")});
  unknown.tokenizer = "word";
  expect_error(ErrorKind::config, "there is no tokenizer 'word'", [&] { prepare(unknown); });
  expect_error(ErrorKind::config, "did you mean 'blank'?", [] { parse_document_rule("blanks"); });
  EXPECT_EQ(parse_document_rule("file"), DocumentRule::file);
  EXPECT_FALSE(std::filesystem::exists(index_path(prefix_)));
}

TEST_F(Preparing, WalksAFolderInOrderAndLeavesItsOwnOutputOut) {
  std::filesystem::create_directories(folder_ / "texts/sub");
  input("texts/b", "b");
  input("texts/a", "a");
  input("texts/sub/c", "c");
  input("texts/.hidden", "h");
  prefix_ = (folder_ / "texts/out").string();
  for (int run = 0; run < 2; ++run) {
    EXPECT_EQ(prepare(options({(folder_ / "texts").string()})).files, 3);
    EXPECT_EQ(documents(), (Texts{"a", "b", "c"}));
  }
}

TEST_F(Preparing, CutsLongDocumentsWithoutLosingAByte) {
  const std::size_t piece = TextSource::piece_bytes;
  const std::string lines = sample_text(3 * piece);
  std::string no_blank;
  for (std::size_t i = 0; i < lines.size(); ++i)
    if (i == 0 || lines[i] != '\n' || lines[i - 1] != '\n') no_blank += lines[i];
  std::string no_newline = no_blank;
  std::replace(no_newline.begin(), no_newline.end(), '\n', ' ');
  std::string no_space(2 * piece + 1, 'x');
  std::string accents;
  while (accents.size() < 2 * piece) accents += "\xf0\x9f\x99\x82\xc3\xa9";
  for (const std::string& text : {no_blank, no_newline, no_space, accents, "a" + accents, "ab" + accents})
    for (const DocumentRule rule : {DocumentRule::blank, DocumentRule::line, DocumentRule::file}) {
      if (rule == DocumentRule::line && text == no_blank) continue;
      const auto texts = prepared(text, rule);
      ASSERT_EQ(texts.size(), 1u);
      std::string expected = text;
      if (rule == DocumentRule::blank && expected.ends_with('\n')) expected.pop_back();
      ASSERT_TRUE(texts.front() == expected);
      const auto dataset = IndexedDataset::open(prefix_);
      EXPECT_GE(dataset->sequences(), 2);
      for (std::int64_t i = 0; i < dataset->sequences(); ++i)
        EXPECT_LE(dataset->length(i), 2 * static_cast<std::int32_t>(piece));
      EXPECT_EQ(prepare(options({input("in.txt", text)}, rule)).invalid_bytes, 0) << "cut inside a character";
    }
}

TEST_F(Preparing, GivesTheSameFilesForAnyNumberOfThreads) {
  // More than one round of jobs, small and long documents.
  const std::string text = sample_text(9 << 20) + std::string(700000, 'y') + "\n\n" + sample_text(300000, 2);
  PrepareOptions job = options({input("big.txt", text), input("more.jsonl", "{\"text\": \"last one\"}")});
  job.tokenizer = "spm-train:600";
  job.tokenizer_sample_bytes = 200000;
  std::map<std::string, std::string> first;
  for (const int threads : {1, 3}) {
    job.threads = threads;
    const PrepareReport report = prepare(job);
    EXPECT_EQ(report.info.vocab_size, 600);
    for (const char* suffix : {".bin", ".idx", ".json", ".model"}) {
      const std::string content = read_text(prefix_ + suffix);
      EXPECT_FALSE(content.empty());
      if (threads == 1)
        first[suffix] = content;
      else
        EXPECT_TRUE(first[suffix] == content) << suffix << " with " << threads << " threads";
    }
  }
  std::string joined;
  for (const std::string& document : documents()) joined += document + "\n\n";
  std::string expected = text;
  for (std::size_t at; (at = expected.find("\n\n\n")) != std::string::npos;) expected.erase(at, 1);
  EXPECT_TRUE(joined.starts_with(expected.substr(0, 1 << 20)));
  EXPECT_TRUE(joined.ends_with("\n\nlast one\n\n"));
}

/// A line without a space, longer than what the trainer takes at once.
TEST_F(Preparing, LearnsATokenizerOfLinesWithoutSpaces) {
  const std::vector<std::string> words{"日本語", "文章", "世界", "言葉"};
  std::string text;
  for (std::size_t i = 0; text.size() < 60000; ++i) text += words[(i * i + i / 7) % words.size()];
  PrepareOptions job = options({input("in", text)});
  job.tokenizer = "spm-train:300";
  prepare(job);
  EXPECT_EQ(documents(), Texts{text});
  EXPECT_LT(read_dataset_info(prefix_)->tokens, 20000) << "characters and words are pieces, not bytes alone";
}

TEST_F(Preparing, StoresTheModelBesideTheDataset) {
  PrepareOptions job = options({input("in", sample_text(100000))});
  job.tokenizer = "spm-train:400:bpe";
  const auto trained = prepare(job);
  EXPECT_EQ(trained.info.tokenizer, "spm:" + prefix_ + ".model");
  const std::string model = read_text(model_path(prefix_));
  const auto texts = documents();

  job.tokenizer = "spm:" + prefix_ + ".model";
  job.output = (folder_ / "second").string();
  prepare(job);
  EXPECT_EQ(read_text(model_path(job.output)), model);
  EXPECT_EQ(read_text(bin_path(job.output)), read_text(bin_path(prefix_)));

  std::filesystem::create_directory(folder_ / "elsewhere");
  for (const char* suffix : {".bin", ".idx", ".json", ".model"})
    std::filesystem::rename(prefix_ + suffix, folder_ / "elsewhere" / (std::string("moved") + suffix));
  prefix_ = (folder_ / "elsewhere/moved").string();
  std::filesystem::rename(prefix_ + ".model", folder_ / "elsewhere/out.model");
  EXPECT_EQ(documents(), texts);
}

TEST_F(Preparing, DescribesTheDataset) {
  const auto report = prepare(options({input("in", "aab\n\nab")}));
  const auto info = read_dataset_info(prefix_);
  ASSERT_TRUE(info);
  EXPECT_EQ(info->tokenizer, "byte");
  EXPECT_EQ(info->vocab_size, 257);
  EXPECT_EQ(info->end_of_document, 256);
  EXPECT_EQ(info->token_type, "uint16");
  EXPECT_EQ(info->tokens, 7);
  EXPECT_EQ(info->documents, 2);
  EXPECT_EQ(info->sequences, 2);
  EXPECT_EQ(info->text_bytes, 5);
  const double expected = -(3. / 7 * std::log(3. / 7) + 2 * (2. / 7 * std::log(2. / 7)));
  EXPECT_NEAR(info->unigram_entropy, expected, 1e-14);
  EXPECT_EQ(info->unigram_entropy, report.info.unigram_entropy);
  EXPECT_FALSE(read_dataset_info((folder_ / "none").string()));
  const std::string whole = read_text(info_path(prefix_));
  const auto expect_damage = [&](const std::string& from, const std::string& to) {
    std::string text = whole;
    ASSERT_NE(text.find(from), std::string::npos) << from;
    write_text(info_path(prefix_), text.replace(text.find(from), from.size(), to));
    expect_error(ErrorKind::data, "out.json' is damaged", [&] { read_dataset_info(prefix_); });
  };
  expect_damage("\"tokens\": 7", "\"tokens\": -7");
  expect_damage("\"tokens\": 7", "\"tokens\": 18446744073709551615");
  expect_damage("\"documents\": 2", "\"documents\": 2.5");
  expect_damage("\"sequences\": 2", "\"sequences\": \"2\"");
  expect_damage("\"vocab_size\": 257", "\"vocab_size\": 4294967297");
  expect_damage("\"end_of_document\": 256", "\"end_of_document\": 257");
  for (const char* bad : {"", "{", "{}", "{\"format\": \"sherd dataset\", \"version\": 2}", "[]"}) {
    write_text(info_path(prefix_), bad);
    expect_error(ErrorKind::data, "run 'sherd prepare' again", [&] { read_dataset_info(prefix_); });
  }
}

TEST(UnigramEntropy, OfKnownDistributions) {
  const std::vector<std::int64_t> uniform(1000, 7), one{0, 5, 0}, none(3, 0);
  EXPECT_NEAR(unigram_entropy(uniform), std::log(1000.), 1e-12);
  EXPECT_EQ(unigram_entropy(one), 0);
  EXPECT_EQ(unigram_entropy(none), 0);
}

TEST_F(Preparing, ReportsProgress) {
  const std::string text = sample_text(9 << 20);
  PrepareOptions job = options({input("in", text)});
  std::vector<PrepareProgress> seen;
  job.progress = [&](const PrepareProgress& progress) { seen.push_back(progress); };
  const auto report = prepare(job);
  ASSERT_GE(seen.size(), 2u);
  for (std::size_t i = 1; i < seen.size(); ++i) EXPECT_GE(seen[i].bytes_done, seen[i - 1].bytes_done);
  EXPECT_EQ(seen.back().bytes_done, text.size());
  EXPECT_EQ(seen.back().bytes_total, text.size());
  EXPECT_EQ(seen.back().tokens, report.info.tokens);

  job.output = (folder_ / "stopped").string();
  job.progress = [](const PrepareProgress&) { fail(ErrorKind::interrupted, "stop"); };
  expect_error(ErrorKind::interrupted, "stop", [&] { prepare(job); });
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path()))
    EXPECT_FALSE(entry.path().filename().string().starts_with("stopped")) << entry.path();
}

TEST_F(Preparing, ReadsAPipe) {
  const std::string pipe = (folder_ / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  PrepareOptions training = options({pipe});
  training.tokenizer = "spm-train:400";
  expect_error(ErrorKind::usage, "can be read only once", [&] { prepare(training); });
  std::thread packer([&] { write_text(pipe, "BZh91AY&SY\x01\x02"); });
  expect_error(ErrorKind::data, "pipe' is a bzip2 file", [&] { prepare(options({pipe})); });
  packer.join();
  std::thread writer([&] { write_text(pipe, "one\n\ntwo"); });
  prepare(options({pipe}));
  writer.join();
  EXPECT_EQ(documents(), (Texts{"one", "two"}));
}

}  // namespace
}  // namespace sherd::data
