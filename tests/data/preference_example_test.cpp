// Lines of answers that people compared or judged: which texts they are, on which side, and what of them is
// learned.
#include <gtest/gtest.h>

#include "data/text/example.h"
#include "data_test_support.h"
#include "support/expect_error.h"

namespace sherd::data {
namespace {

using testing::expect_error;
using Lines = std::vector<std::string>;

const auto byte_tokenizer = make_byte_tokenizer();

std::vector<Example> examples_in(const std::string& line, const std::string& field = "") {
  return read_examples(line, {field, ChatTemplate::named("plain", *byte_tokenizer)}, "in.jsonl", 7);
}

/// Each text behind its side: + is chosen, - rejected. What is learned is in ⟦⟧; the end of a document is ∎.
Lines texts_in(const std::string& line, const std::string& field = "") {
  Lines out;
  for (const Example& example : examples_in(line, field)) {
    std::string text = example.side == Side::chosen ? "+" : example.side == Side::rejected ? "-" : "";
    bool open = false;
    for (const TextSegment& segment : example.segments) {
      if (segment.learned != open) text += segment.learned ? "⟦" : "⟧", open = segment.learned;
      text += segment.kind == SegmentKind::end ? "∎" : segment.text;
    }
    out.push_back(text + (open ? "⟧" : ""));
  }
  return out;
}

std::string user(const std::string& text) {
  return "### User:\n" + text + "\n\n";
}
std::string assistant(const std::string& text) {
  return "### Assistant:\n" + text;
}

TEST(PreferenceLines, CompareTwoAnswersToAPrompt) {
  EXPECT_EQ(texts_in(R"({"prompt": "a ", "chosen": "b", "rejected": "c"})"), (Lines{"+a ⟦b∎⟧", "-a ⟦c∎⟧"}));
  EXPECT_EQ(texts_in(R"({"rejected": "c", "chosen": "b", "prompt": "a "})"), (Lines{"+a ⟦b∎⟧", "-a ⟦c∎⟧"}))
      << "whatever stands first";
  EXPECT_EQ(texts_in(R"({"prompt": "ab", "chosen": "abc", "rejected": "abd"})"),
            (Lines{"+ab⟦abc∎⟧", "-ab⟦abd∎⟧"}))
      << "answers that repeat a prompt which is given are answers";
  EXPECT_EQ(texts_in(R"({"prompt": "a", "chosen": "b", "rejected": "", "id": 1, "label": 1,
                         "score_chosen": 8.5})"),
            (Lines{"+a⟦b∎⟧", "-a⟦∎⟧"}));
  for (const Example& text : examples_in(R"({"prompt": "a", "chosen": "b", "rejected": "c"})")) {
    EXPECT_TRUE(text.marked);
    EXPECT_FALSE(text.conversation);
  }
}

TEST(PreferenceLines, CompareMessages) {
  const Lines both{"+" + user("a") + assistant("⟦b∎⟧"), "-" + user("a") + assistant("⟦c∎⟧")};
  const std::string asks = R"({"prompt": [{"role": "user", "content": "a"}], )";
  EXPECT_EQ(texts_in(asks + R"("chosen": [{"role": "assistant", "content": "b"}],
                               "rejected": [{"role": "assistant", "content": "c"}]})"),
            both);
  EXPECT_EQ(texts_in(asks + R"("chosen": {"role": "assistant", "content": "b"},
                               "rejected": {"role": "assistant", "content": "c"}})"),
            both)
      << "a message may stand alone";
  EXPECT_EQ(texts_in(asks + R"("chosen": {"from": "gpt", "value": "b"},
                               "rejected": {"from": "gpt", "value": "c"}})"),
            both);
  EXPECT_EQ(texts_in(asks + R"("chosen": "b", "rejected": "c"})"), both);
  EXPECT_EQ(texts_in(R"({"prompt": [{"from": "human", "value": "a"}],
                         "chosen": "b", "rejected": "c"})"),
            both);
  EXPECT_EQ(texts_in(R"({"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}],
                         "rejected": [{"role": "assistant", "content": "c"}]})"),
            both)
      << "a text before messages is the user's";
  for (const Example& text : examples_in(asks + R"("chosen": "b", "rejected": "c"})")) {
    EXPECT_TRUE(text.marked);
    EXPECT_TRUE(text.conversation);
  }
}

/// Nothing of a prompt is learned, and of an answer whatever the assistant says in it, but what it refuses.
TEST(PreferenceLines, LearnAnswersOfSeveralMessages) {
  EXPECT_EQ(
      texts_in(R"({"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "a"},
                                    {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
                         "chosen": [{"role": "assistant", "content": "d"}, {"role": "user", "content": "e"},
                                    {"role": "assistant", "content": "f"}],
                         "rejected": [{"role": "assistant", "content": "g", "weight": 0},
                                      {"role": "assistant", "content": "h"}]})"),
      (Lines{"+S\n\n" + user("a") + assistant("b∎") + user("c") + assistant("⟦d∎⟧") + user("e") +
                 assistant("⟦f∎⟧"),
             "-S\n\n" + user("a") + assistant("b∎") + user("c") + assistant("g∎") + assistant("⟦h∎⟧")}));
}

TEST(PreferenceLines, GiveTheTemplateWhatStandsBeside) {
  const std::string by = "{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}";
  const std::string line = R"({"chat_template_kwargs": {"mood": "calm "}, "prompt": "a", "chosen":
      [{"role": "assistant", "content": "b"}], "rejected": [{"role": "assistant", "content": "c"}]})";
  const auto pair = read_examples(line, {"", ChatTemplate::of_text(by, {}, *byte_tokenizer)}, "in.jsonl", 7);
  ASSERT_EQ(pair.size(), 2u);
  EXPECT_EQ(text_of(pair[0]), "calm ab");
  EXPECT_EQ(text_of(pair[1]), "calm ac");
}

/// As in the datasets of Bai et al. 2022: the prompt is what both texts begin with.
TEST(PreferenceLines, FindThePromptOfTwoTexts) {
  const auto said = [](const std::string& chosen, const std::string& rejected) {
    return texts_in(R"({"chosen": ")" + chosen + R"(", "rejected": ")" + rejected + R"("})");
  };
  EXPECT_EQ(said("Q: x A: yes", "Q: x A: no"), (Lines{"+Q: x A:⟦ yes∎⟧", "-Q: x A:⟦ no∎⟧"}))
      << "a space goes with the answer";
  EXPECT_EQ(said("A:  yes", "A:  no"), (Lines{"+A: ⟦ yes∎⟧", "-A: ⟦ no∎⟧"})) << "one space";
  EXPECT_EQ(said(R"(A:\nyes)", R"(A:\nno)"), (Lines{"+A:\n⟦yes∎⟧", "-A:\n⟦no∎⟧"}));
  EXPECT_EQ(said("abX", "abYZ"), (Lines{"+ab⟦X∎⟧", "-ab⟦YZ∎⟧"}));
  EXPECT_EQ(said("x", "y"), (Lines{"+⟦x∎⟧", "-⟦y∎⟧"}));
  EXPECT_EQ(said(" x", " y"), (Lines{"+⟦ x∎⟧", "-⟦ y∎⟧"}));
}

TEST(PreferenceLines, CutNoCharacterOfAPrompt) {
  const auto said = [](const std::string& chosen, const std::string& rejected) {
    return texts_in(R"({"chosen": ")" + chosen + R"(", "rejected": ")" + rejected + R"("})");
  };
  EXPECT_EQ(said("aé", "aè"), (Lines{"+a⟦é∎⟧", "-a⟦è∎⟧"}));
  EXPECT_EQ(said("a €", "a ₭"), (Lines{"+a⟦ €∎⟧", "-a⟦ ₭∎⟧"})) << "and the space before it";
  EXPECT_EQ(said("é😀", "é😁"), (Lines{"+é⟦😀∎⟧", "-é⟦😁∎⟧"}));
  EXPECT_EQ(said("😀", "😁"), (Lines{"+⟦😀∎⟧", "-⟦😁∎⟧"}));
  EXPECT_EQ(said("éa", "éb"), (Lines{"+é⟦a∎⟧", "-é⟦b∎⟧"}));
}

/// Something is left of both.
TEST(PreferenceLines, FindThePromptWhereOneTextBeginsTheOther) {
  const auto said = [](const std::string& chosen, const std::string& rejected) {
    return texts_in(R"({"chosen": ")" + chosen + R"(", "rejected": ")" + rejected + R"("})");
  };
  EXPECT_EQ(said("ab", "abc"), (Lines{"+a⟦b∎⟧", "-a⟦bc∎⟧"}));
  EXPECT_EQ(said("abc", "ab"), (Lines{"+a⟦bc∎⟧", "-a⟦b∎⟧"}));
  EXPECT_EQ(said("aé", "aéb"), (Lines{"+a⟦é∎⟧", "-a⟦éb∎⟧"}));
  EXPECT_EQ(said("a b", "a bc"), (Lines{"+a⟦ b∎⟧", "-a⟦ bc∎⟧"}));
  EXPECT_EQ(said("a", "ab"), (Lines{"+⟦a∎⟧", "-⟦ab∎⟧"}));
}

TEST(PreferenceLines, FindThePromptOfTwoListsOfMessages) {
  EXPECT_EQ(texts_in(R"({"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
                         "rejected": [{"role": "user", "content": "a"},
                                      {"role": "assistant", "content": "c"}]})"),
            (Lines{"+" + user("a") + assistant("⟦b∎⟧"), "-" + user("a") + assistant("⟦c∎⟧")}));
  EXPECT_EQ(texts_in(R"({"chosen": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
                         "rejected": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "c"}]})"),
            (Lines{"+" + user("a") + assistant("⟦b∎⟧"), "-" + user("a") + assistant("⟦c∎⟧")}));
  const std::string begin = R"([{"role": "system", "content": "S"}, {"role": "user", "content": "a"},
                                {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, )";
  const std::string before = "S\n\n" + user("a") + assistant("b∎") + user("c");
  EXPECT_EQ(texts_in(R"({"chosen": )" + begin + R"({"role": "assistant", "content": "d"}], "rejected": )" +
                     begin + R"({"role": "assistant", "content": "e"}, {"role": "user", "content": "f"},
                                {"role": "assistant", "content": "g"}]})"),
            (Lines{"+" + before + assistant("⟦d∎⟧"),
                   "-" + before + assistant("⟦e∎⟧") + user("f") + assistant("⟦g∎⟧")}))
      << "answers of both that are the same are no answers";
  const std::string talk = R"({"role": "developer", "content": "a"}, {"role": "assistant", "content": "b"})";
  const std::string line = R"({"chosen": [)" + talk + R"(], "rejected": [)" + talk +
                           R"(, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]})";
  const auto pair = read_examples(
      line,
      {"", ChatTemplate::of_text("{% for m in messages %}{{ m.content }}{% endfor %}", {}, *byte_tokenizer)},
      "in.jsonl", 7);
  ASSERT_EQ(pair.size(), 2u);
  EXPECT_EQ(text_of(pair[0]), "ab");
  EXPECT_EQ(text_of(pair[1]), "abcd");
  EXPECT_TRUE(pair[0].teaches()) << "the last of each list is its own, though the other goes on";
}

/// UltraFeedback's binarized form says the question three times.
TEST(PreferenceLines, TakeAQuestionOnceThatStandsInSeveralPlaces) {
  const Lines both{"+" + user("a") + assistant("⟦b∎⟧"), "-" + user("a") + assistant("⟦c∎⟧")};
  const std::string lists =
      R"("chosen": [{"content": "a", "role": "user"}, {"content": "b", "role": "assistant"}],
         "rejected": [{"content": "a", "role": "user"}, {"content": "c", "role": "assistant"}])";
  EXPECT_EQ(texts_in(R"({"prompt": "a", "prompt_id": "x", "score_chosen": 8, )" + lists +
                     R"(, "messages": [{"content": "a", "role": "user"},
                                       {"content": "b", "role": "assistant"}]})"),
            both);
  EXPECT_EQ(texts_in(R"({"prompt": [{"role": "user", "content": "a"}], )" + lists + "}"), both);
  const std::string begin = R"([{"role": "system", "content": "S"}, {"role": "user", "content":
                                [{"type": "text", "text": "a"}]}, )";
  EXPECT_EQ(texts_in(R"({"prompt": "a", "chosen": )" + begin + R"({"role": "assistant", "content": "b"}],
                         "rejected": )" +
                     begin + R"({"role": "assistant", "content": "c"}]})"),
            (Lines{"+S\n\n" + both[0].substr(1), "-S\n\n" + both[1].substr(1)}))
      << "whichever message the prompt is";
}

/// A list of messages before lists that begin with the user's is a part of the talk.
TEST(PreferenceLines, GoOnWithAPromptOfMessages) {
  EXPECT_EQ(texts_in(R"({"prompt": [{"role": "system", "content": "S"}],
          "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
          "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]})"),
            (Lines{"+S\n\n" + user("a") + assistant("⟦b∎⟧"), "-S\n\n" + user("a") + assistant("⟦c∎⟧")}));
}

TEST(PreferenceLines, AnswerWhatOtherKeysAsk) {
  const Lines both{"+" + user("a") + assistant("⟦b∎⟧"), "-" + user("a") + assistant("⟦c∎⟧")},
      told{"+S\n\n" + user("a") + assistant("⟦b∎⟧"), "-S\n\n" + user("a") + assistant("⟦c∎⟧")};
  const std::string turns =
      R"("chosen": {"from": "gpt", "value": "b"}, "rejected": {"from": "gpt", "value": "c"})";
  EXPECT_EQ(texts_in(R"({"conversations": [{"from": "human", "value": "a"}], )" + turns + "}"), both);
  EXPECT_EQ(texts_in(R"({"system": "S", "conversations": [{"from": "human", "value": "a"}], )" + turns + "}"),
            told);
  EXPECT_EQ(texts_in(R"({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"},
                                           {"from": "human", "value": "a"}],
                         "chosen": "b", "rejected": "c"})"),
            (Lines{"+" + user("x") + assistant("y∎") + user("a") + assistant("⟦b∎⟧"),
                   "-" + user("x") + assistant("y∎") + user("a") + assistant("⟦c∎⟧")}));
  EXPECT_EQ(texts_in(R"({"messages": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"})"),
            both);
  EXPECT_EQ(texts_in(R"({"instruction": "a", "input": "", "chosen": "b", "rejected": "c"})"), both);
  EXPECT_EQ(texts_in(R"({"instruction": "a", "system": "S", "chosen": "b", "rejected": "c"})"), told);
  EXPECT_EQ(texts_in(R"({"instruction": "a", "input": "i", "chosen": "b", "rejected": "c", "output": "z"})"),
            (Lines{"+" + user("a\ni") + assistant("⟦b∎⟧"), "-" + user("a\ni") + assistant("⟦c∎⟧")}));
}

/// Answers of the history are not judged.
TEST(PreferenceLines, LearnNothingOfAHistory) {
  EXPECT_EQ(texts_in(R"({"instruction": "a", "input": "i", "history": [["x", "y"]], "chosen": "b",
                         "rejected": "c", "output": "z"})"),
            (Lines{"+" + user("x") + assistant("y∎") + user("a\ni") + assistant("⟦b∎⟧"),
                   "-" + user("x") + assistant("y∎") + user("a\ni") + assistant("⟦c∎⟧")}));
}

TEST(PreferenceLines, JudgeAnAnswer) {
  EXPECT_EQ(texts_in(R"({"prompt": "a", "completion": "b", "label": true})"), (Lines{"+a⟦b∎⟧"}));
  EXPECT_EQ(texts_in(R"({"prompt": "a", "response": "b", "label": false})"), (Lines{"-a⟦b∎⟧"}));
  const std::string talk = user("a") + assistant("⟦b∎⟧");
  EXPECT_EQ(texts_in(R"({"prompt": [{"role": "user", "content": "a"}],
                         "completion": [{"role": "assistant", "content": "b"}], "label": true})"),
            Lines{"+" + talk});
  EXPECT_EQ(
      texts_in(R"({"prompt": "a", "completion": {"role": "assistant", "content": "b"}, "label": false})"),
      Lines{"-" + talk});
  EXPECT_EQ(texts_in(R"({"instruction": "a", "output": "b", "label": false})"), Lines{"-" + talk});
  EXPECT_EQ(texts_in(R"({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
                         "label": true})"),
            Lines{"+" + talk});
}

TEST(PreferenceLines, LabelsAreTrueAndFalseInAnyForm) {
  const auto line = [](const char* label) {
    return cat(R"({"prompt": "a", "completion": "b", "label": )", label, "}");
  };
  for (const char* label : {"true", "1", "\"true\"", "\"1\""})
    EXPECT_EQ(texts_in(line(label)), Lines{"+a⟦b∎⟧"});
  for (const char* label : {"false", "0", "\"False\"", "\"0\""})
    EXPECT_EQ(texts_in(line(label)), Lines{"-a⟦b∎⟧"});
  for (const char* label : {"2", "0.5", "\"desirable\"", "[true]"})
    expect_error(ErrorKind::data, "whether it is desirable", [&] { examples_in(line(label)); });
}

/// The label is that of the last answer; what was said before is not judged.
TEST(PreferenceLines, JudgeTheLastAnswerOfAConversation) {
  const std::string talk = R"("messages": [{"role": "user", "content": "a"},
      {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
      {"role": "assistant", "content": "d")";
  EXPECT_EQ(texts_in("{\"label\": false, " + talk + "}]}"),
            Lines{"-" + user("a") + assistant("b∎") + user("c") + assistant("⟦d∎⟧")});
  EXPECT_EQ(texts_in("{\"label\": true, " + talk + R"(}, {"role": "user", "content": "e"}]})"),
            Lines{"+" + user("a") + assistant("b∎") + user("c") + assistant("⟦d∎⟧") + user("e")});
  const auto unlearned = examples_in("{\"label\": true, " + talk + R"(, "weight": 0}]})");
  ASSERT_EQ(unlearned.size(), 1u);
  EXPECT_FALSE(unlearned[0].teaches()) << "no earlier answer takes the place of one that is not learned";
}

TEST(PreferenceLines, RankAnswers) {
  EXPECT_EQ(texts_in(R"({"prompt": "p", "completions": ["a", "b", "c"]})"),
            (Lines{"+p⟦a∎⟧", "-p⟦b∎⟧", "+p⟦a∎⟧", "-p⟦c∎⟧", "+p⟦b∎⟧", "-p⟦c∎⟧"}))
      << "the first is the best";
  EXPECT_EQ(texts_in(R"({"prompt": "p", "responses": ["a", "b"]})"), (Lines{"+p⟦a∎⟧", "-p⟦b∎⟧"}));
  EXPECT_EQ(
      texts_in(R"({"prompt": "p", "completions": ["a", "b", "c"], "ranks": [2, 1, 3], "scores": null})"),
      (Lines{"+p⟦a∎⟧", "-p⟦c∎⟧", "+p⟦b∎⟧", "-p⟦a∎⟧", "+p⟦b∎⟧", "-p⟦c∎⟧"}))
      << "1 is the best rank";
  EXPECT_EQ(texts_in(R"({"prompt": "p", "responses": ["a", "b", "c"], "scores": [0.5, -1.5, 8]})"),
            (Lines{"+p⟦a∎⟧", "-p⟦b∎⟧", "+p⟦c∎⟧", "-p⟦a∎⟧", "+p⟦c∎⟧", "-p⟦b∎⟧"}))
      << "and the highest score";
  EXPECT_EQ(texts_in(R"({"prompt": "p", "completions": ["a", "b", "c"], "ranks": [1, 2, 2]})"),
            (Lines{"+p⟦a∎⟧", "-p⟦b∎⟧", "+p⟦a∎⟧", "-p⟦c∎⟧"}))
      << "none of two is better than the other";
  EXPECT_EQ(texts_in(R"({"prompt": "p", "completions": ["a", "b", "c"], "scores": [3, 1, 3]})"),
            (Lines{"+p⟦a∎⟧", "-p⟦b∎⟧", "+p⟦c∎⟧", "-p⟦b∎⟧"}));
  EXPECT_EQ(texts_in(R"({"prompt": "p", "completions": ["a", "b", "a"]})"),
            (Lines{"+p⟦a∎⟧", "-p⟦b∎⟧", "+p⟦b∎⟧", "-p⟦a∎⟧"}))
      << "nor the same answer than itself";
}

TEST(PreferenceLines, RankMessages) {
  const Lines both{"+" + user("a") + assistant("⟦b∎⟧"), "-" + user("a") + assistant("⟦c∎⟧")};
  EXPECT_EQ(texts_in(R"({"prompt": "a", "completions": [{"role": "assistant", "content": "c"},
                         {"role": "assistant", "content": "b"}], "scores": [1, 2]})"),
            both);
  EXPECT_EQ(texts_in(R"({"prompt": [{"role": "user", "content": "a"}], "responses": ["b", "c"]})"), both);
  EXPECT_EQ(texts_in(R"({"instruction": "a", "responses": ["b", "c"]})"), both);
  EXPECT_EQ(texts_in(R"({"messages": [{"role": "user", "content": "a"}], "completions":
                         [[{"role": "assistant", "content": "b"}],
                          [{"role": "assistant", "content": "c"}]]})"),
            both);
  std::string many;
  for (int i = 0; i < 32; ++i) many += cat(i ? ", " : "", "\"", i, "\"");
  EXPECT_EQ(texts_in(R"({"prompt": "p", "completions": [)" + many + "]}").size(), 2u * 496u);
}

TEST(PreferenceLines, LeaveOtherLinesWhatTheyAre) {
  EXPECT_EQ(texts_in(R"({"text": "a", "chosen": "b"})"), Lines{"⟦a⟧"}) << "a column of another meaning";
  EXPECT_EQ(texts_in(R"({"text": "a", "rejected": true})"), Lines{"⟦a⟧"});
  EXPECT_EQ(
      texts_in(R"({"text": "a", "chosen": null, "rejected": null, "label": null, "completions": null})"),
      Lines{"⟦a⟧"})
      << "columns without a value";
  EXPECT_EQ(texts_in(R"({"text": "a", "label": true})"), Lines{"⟦a⟧"});
  EXPECT_EQ(texts_in(R"({"prompt": "a", "completion": "b", "label": null})"), Lines{"a⟦b∎⟧"});
  EXPECT_EQ(texts_in(R"({"prompt": "a", "completion": "b", "completions": "c"})"), Lines{"a⟦b∎⟧"});
  EXPECT_EQ(texts_in(R"({"prompt": "a", "chosen": "b", "rejected": "c"})", "chosen"), Lines{"⟦b⟧"})
      << "as it was asked for";
  EXPECT_EQ(
      texts_in(R"({"prompt": "a", "chosen": "b", "rejected": "c", "completions": ["x"], "label": true})"),
      (Lines{"+a⟦b∎⟧", "-a⟦c∎⟧"}))
      << "two that were compared go before lists and labels";
}

TEST(PreferenceLines, NameFileLineAndCause) {
  const auto refused = [](const std::string& line, const std::string& part) {
    expect_error(ErrorKind::data, "'in.jsonl', line 7, ", [&] { examples_in(line); });
    expect_error(ErrorKind::data, part, [&] { examples_in(line); });
  };
  refused(R"({"prompt": "a", "chosen": "b"})",
          "has 'chosen' without 'rejected'; answers that are judged alone have 'prompt', 'completion' and "
          "'label' (true or false)");
  refused(R"({"prompt": "a", "chosen": null, "rejected": "b"})", "has 'rejected' without 'chosen'");
  refused(R"({"prompt": "a", "chosen": "b", "rejected": "b"})", "'chosen' and 'rejected' are the same");
  refused(R"({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2})",
          "has 'margin', which no objective here reads: take it out");
  refused(R"({"prompt": 1, "chosen": "b", "rejected": "c"})",
          "'prompt' is neither a string, a message, nor a list of messages");
  refused(R"({"prompt": "a", "completion": 2, "label": true})",
          "'completion' is neither a string, a message, nor a list of messages");
  refused(R"({"prompt": "a", "chosen": 1, "rejected": "c"})", "has 'rejected' without 'chosen'");
  refused(R"({"prompt": "a", "chosen": "b", "rejected": 2})", "has 'chosen' without 'rejected'");
  refused(R"({"prompt": "a", "responses": ["b", 2]})", "item 1 of 'responses' is no answer");
  refused(R"({"prompt": "a", "responses": ["b", {"x": "c"}]})", "(its keys: 'x')");
  refused(R"({"prompt": "a", "responses": ["b", {"role": "assistant", "content": "c"}]})",
          "some of 'responses' are texts, and others messages");
  refused(R"({"prompt": "a", "completions": ["b", "c"], "labels": [true, false]})", "steps of one answer");
  refused(R"({"prompt": "a", "completions": [{"response": "b", "score": 1}, {"response": "c"}]})",
          "some answers have a score, and answer 1 has none");
  refused(
      R"({"prompt": "a", "completions": [{"response": "b", "score": "9"}, {"response": "c", "score": 1}]})",
      "'score' of item 0 of 'completions' is no number");
  refused(R"({"prompt": "a", "completions": [{"response": "b", "rank": 1, "score": 1}, {"response": "c"}]})",
          "item 0 of 'completions' has 'rank' and 'score', which both order the answers");
  refused(R"({"prompt": "a", "completions": [{"response": "b", "rank": 1}, {"response": "c", "score": 2}]})",
          "some answers have 'rank', and answer 1 has 'score': give all the same");
  refused(R"({"prompt": "a", "chosen": "b", "rejected": {"role": "assistant", "content": "c"}})",
          "one is a text, and the other messages");
  refused(
      R"({"prompt": "a", "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
              "rejected": [{"role": "assistant", "content": "c"}]})",
      "one begins with a question, and the other does not");
  refused(R"({"prompt": "What is the capital?", "chosen": "What is the capital? Oslo",
              "rejected": "What is the capital? Rome"})",
          "begin with 'prompt', which would stand there twice");
  refused(R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
              "chosen": "c", "rejected": "d"})",
          "what is asked ends with the assistant's words");
  refused(R"({"prompt": "a", "chosen": ["b"], "rejected": ["c"]})", "no object with a string 'role'");
  refused(R"({"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
              "rejected": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "b"}]})",
          "'chosen' and 'rejected' do not begin with the same question");
  refused(
      R"({"prompt": "x", "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
              "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]})",
      "'prompt' is none of the messages with which 'chosen' and 'rejected' begin: which of them is asked?");
  refused(
      R"({"prompt": "a", "chosen": {"role": "assistant", "content": "b"},
          "rejected": {"role": "assistant", "content": "c"}, "tools": [{}]})",
      "gives the template 'tools' beside the messages");
  refused(R"({"conversations": {}, "chosen": "b", "rejected": "c"})", "'conversations' is no list");
}

TEST(PreferenceLines, NameWhatIsWrongWithARanking) {
  const auto refused = [](const std::string& beside, const std::string& part) {
    const std::string line = R"({"prompt": "p", "completions": )" + beside + "}";
    expect_error(ErrorKind::data, "'in.jsonl', line 7, ", [&] { examples_in(line); });
    expect_error(ErrorKind::data, part, [&] { examples_in(line); });
  };
  refused(R"(["a"])", "'completions' has 1 answer; 2 to 32");
  std::string many = "\"a\"";
  for (int i = 0; i < 32; ++i) many += cat(", \"", i, "\"");
  refused("[" + many + "]", "'completions' has 33 answers; 2 to 32");
  refused(R"(["a", "b"], "ranks": [1, 2], "scores": [2, 1])",
          "'ranks' and 'scores' both order the answers: keep one");
  refused(R"(["a", "b"], "ranks": [1])", "'ranks' is no list of 2 numbers, one for each answer");
  refused(R"(["a", "b"], "scores": [1, "2"])", "'scores' is no list of 2 numbers");
  refused(R"(["a", "b"], "scores": 1)", "'scores' is no list of 2 numbers");
  refused(R"(["a", "b"], "ranks": [1, 1])", "none of 'completions' is better than another");
  refused(R"(["a", "a"])", "none of 'completions' is better than another");
}

TEST(PreferenceLines, NeedATemplateForMessagesAlone) {
  const ExampleOptions none{"", {}, "nothing tells how"};
  EXPECT_EQ(read_examples(R"({"prompt": "a", "chosen": "b", "rejected": "c"})", none, "in.jsonl", 7).size(),
            2u);
  expect_error(ErrorKind::config, "'in.jsonl', line 7, is a conversation: nothing tells how", [&] {
    read_examples(R"({"instruction": "a", "chosen": "b", "rejected": "c"})", none, "in.jsonl", 7);
  });
}

/// Forms of other programs' files.
TEST(PreferenceLines, AreReadAsOthersWriteThem) {
  const auto said = [](const std::string& line) {
    std::string out;
    for (const Example& example : examples_in(line))
      out += cat(example.side == Side::chosen ? "+" : "-", text_of(example), "|");
    return out;
  };
  const std::string talk =
      said(R"({"messages": [{"role": "user", "content": "q"}], "chosen": "y", "rejected": "n"})");
  // OpenAI's, ms-swift's, and lists whose messages have other keys in front.
  EXPECT_EQ(said(R"({"input": {"messages": [{"role": "user", "content": "q"}]},
                     "preferred_output": [{"role": "assistant", "content": "y"}],
                     "non_preferred_output": [{"role": "assistant", "content": "n"}]})"),
            talk);
  EXPECT_EQ(said(R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "y"}],
                     "rejected_response": "n"})"),
            talk);
  EXPECT_EQ(said(R"({"chosen": [{"content": "q", "role": "user"}, {"role": "assistant", "content": "y"}],
                     "rejected": [{"role": "user", "content": [{"type": "text", "text": "q"}]},
                                  {"role": "assistant", "content": "n"}]})"),
            talk);
  EXPECT_EQ(said(R"({"question": "q", "system": "", "chosen": "y", "rejected": "n"})"), talk);
  EXPECT_EQ(said(R"({"prompt": "", "chosen": {"role": "assistant", "content": "y"},
                     "rejected": {"role": "assistant", "content": "n"}})"),
            said(R"({"messages": [], "chosen": {"role": "assistant", "content": "y"},
                     "rejected": {"role": "assistant", "content": "n"}})"));
  // A system's text before a question makes a conversation of both.
  EXPECT_EQ(said(R"({"question": "q", "system": "S", "chosen": "y", "rejected": "n"})"),
            said(R"({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}],
                     "chosen": "y", "rejected": "n"})"));
  EXPECT_EQ(said(R"({"prompt": "q", "system": "S", "chosen": "y", "rejected": "n"})"),
            said(R"({"question": "q", "system": "S", "chosen": "y", "rejected": "n"})"));
  // UltraFeedback's answers with scores.
  EXPECT_EQ(said(R"({"instruction": "q", "completions": [{"response": "n", "overall_score": 2},
                     {"response": "y", "overall_score": 7}]})"),
            talk);
  EXPECT_EQ(said(R"({"prompt": "p", "completion": "c", "kto_tag": false})"), "-pc|");
  EXPECT_EQ(said(R"({"chosen_response": "ay", "rejected_response": "an"})"), "+ay|-an|");
  // A list that is asked stands before lists that begin with a question of their own.
  EXPECT_EQ(said(R"({"prompt": [{"role": "system", "content": "S"}],
                     "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "y"}],
                     "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "n"}]})"),
            said(R"({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}],
                     "chosen": "y", "rejected": "n"})"));
}

}  // namespace
}  // namespace sherd::data
