// The reference's log-probabilities in their file, over stops, other ranks, other weights and damage.
#include "cli/preferences/preference_fixture.h"

namespace sherd::cli {
namespace {

class PreferenceReference : public PreferenceRuns {
 protected:
  static constexpr const char* run_agrees = "the run agrees to the bit\n";

  std::string saved() const { return "training.save_dir=" + in("run"); }
  /// The file of a run which saves nothing lies beside the data, that of others where they save.
  fs::path beside_data() const { return reference_of("pairs"); }
  fs::path of_run() const { return folder_ / "run" / "reference"; }
  void copy_over(const fs::path& from, const fs::path& to) const {
    fs::copy_file(from, to, fs::copy_options::overwrite_existing);
  }
  /// The run is refused with one line that says `what`, and the file's name.
  void expect_refused(const Outcome& got, int code, const std::string& what, const fs::path& named) const {
    EXPECT_EQ(got.code, code) << got.err;
    EXPECT_EQ(count(got.err, "error: "), 1u) << got.err;
    EXPECT_THAT(got.err, HasSubstr(what));
    EXPECT_THAT(got.err, HasSubstr("'" + named.string() + "'"));
  }
  Outcome verify(Words more = {}) const { return sherd(joined_words({"verify", in("run")}, more)); }
  void expect_agrees(const Words& more) const {
    const Outcome outcome = verify(more);
    EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr(run_agrees));
    EXPECT_THAT(outcome.out, Not(HasSubstr("not promised")));
  }
};

TEST_F(PreferenceReference, AStoppedRunIsTheRunWithoutAStop) {
  for (const auto& [name, keys] :
       std::vector<std::pair<std::string, Words>>{{"pairs", {}},
                                                  {"judged",
                                                   {"training.objective=kto", "data.path=" + in("judged"),
                                                    "model.seq_length=64", "train_batch_size=8"}}}) {
    SCOPED_TRACE(name);
    const Words all = joined_words(keys, {saved(), "training.save_interval=2", "training.eval_interval=3"});
    const auto whole = trained(all, 4, {"--steps", "6"});
    ASSERT_EQ(whole.size(), 6u);
    const std::string bytes = read_text(of_run());
    EXPECT_FALSE(fs::exists(reference_of(name)));
    expect_agrees({});
    expect_agrees({"--ranks", "1"});
    fs::remove_all(folder_ / "run");

    auto parts = trained(all, 1, {"--steps", "3"});
    EXPECT_THAT(said_, HasSubstr("are computed before the first step, and kept in " + of_run().string()));
    const auto time = fs::last_write_time(of_run());
    for (const Json& line : trained(all, 2, {"--steps", "6", "--resume"})) parts.push_back(line);
    EXPECT_THAT(said_, Not(HasSubstr("are computed")));
    EXPECT_EQ(course(parts), course(whole));
    EXPECT_EQ(read_text(of_run()), bytes) << "on any number of ranks";
    EXPECT_EQ(fs::last_write_time(of_run()), time);
    fs::remove_all(folder_ / "run");
  }
}

TEST_F(PreferenceReference, IsReadByOtherRanks) {
  const auto first = trained({}, 4);
  const std::string bytes = read_text(beside_data());
  const auto time = fs::last_write_time(beside_data());
  EXPECT_EQ(course(trained_on({}, 1)), course(first));
  EXPECT_THAT(said_, HasSubstr("the reference's log-probabilities are in " + beside_data().string()));
  EXPECT_THAT(said_, Not(HasSubstr("are computed")));
  EXPECT_EQ(read_text(beside_data()), bytes);
  EXPECT_EQ(fs::last_write_time(beside_data()), time);
  // Where a name is given, the file is there and nowhere else.
  trained({"training.preference.reference_file=" + in("mine"), saved()}, 2, {"--steps", "1"});
  EXPECT_EQ(read_text(folder_ / "mine"), bytes);
  EXPECT_FALSE(fs::exists(beside_data()) || fs::exists(of_run()));
}

TEST_F(PreferenceReference, OfOtherWeightsIsMadeAnew) {
  trained({}, 1, {"--steps", "1"});
  const std::string bytes = read_text(beside_data());
  const auto other = trained_on({"training.seed=9"}, 2, {"--steps", "1"});
  EXPECT_THAT(said_, HasSubstr(beside_data().string() + "' is of another reference and is made anew"));
  expect_begins_as_the_reference(other.front());
  EXPECT_NE(read_text(beside_data()), bytes);
  const auto longer = trained_on({"training.seed=9", "model.seq_length=128"}, 1, {"--steps", "1"});
  EXPECT_THAT(said_, HasSubstr("is of another reference (model.seq_length is 96 there, and 128 here)"));
  expect_begins_as_the_reference(longer.front());
  // The first weights again, whose numbers are the same.
  trained_on({}, 4, {"--steps", "1"});
  EXPECT_EQ(read_text(beside_data()), bytes);
}

TEST_F(PreferenceReference, ThatIsDamagedIsNamed) {
  trained({}, 1, {"--steps", "1"});
  const std::string bytes = read_text(beside_data());
  std::string flipped = bytes;
  flipped[flipped.size() - 3] ^= 1;
  for (const auto& [damaged, cause] :
       std::vector<std::pair<std::string, std::string>>{{flipped, "its checksum"},
                                                        {bytes.substr(0, bytes.size() - 8), "its length"},
                                                        {"a text\n" + bytes, "it does not begin as one"}}) {
    write_text(beside_data(), damaged);
    expect_refused(learn({}, 2), 1, cat("is damaged (", cause, "): remove it, and begin the run anew"),
                   beside_data());
    EXPECT_EQ(read_text(beside_data()), damaged) << "it may be wanted";
  }
}

TEST_F(PreferenceReference, ThatIsGoneOrAnotherIsToldOnResume) {
  const auto whole = trained({}, 1, {"--steps", "4"});
  trained({saved()}, 2, {"--steps", "2"});
  const std::string bytes = read_text(of_run());
  const Words on{"--resume", "--steps", "4"};
  fs::remove(of_run());
  expect_refused(learn({saved()}, 2, on), 2, "set training.preference.reference to \"copy\"", of_run());
  EXPECT_FALSE(fs::exists(of_run())) << "weights that were trained are no reference";
  trained({"training.seed=9"}, 1, {"--steps", "1"});
  copy_over(beside_data(), of_run());
  expect_refused(learn({saved()}, 1, on), 2, "has other log-probabilities than those that the checkpoint",
                 of_run());
  trained({"model.seq_length=128"}, 1, {"--steps", "1"});
  copy_over(beside_data(), of_run());
  expect_refused(learn({saved()}, 1, on), 2, "(model.seq_length is 128 there, and 96 here)", of_run());
  // Each of the ways that are told.
  fs::copy(folder_ / "run", folder_ / "run_before", fs::copy_options::recursive);
  const std::vector<Json> rest(whole.begin() + 2, whole.end());
  write_text(folder_ / "kept", bytes);
  for (const std::string& way :
       {std::string("training.preference.reference=copy"), "training.preference.reference_file=" + in("kept"),
        std::string("training.log_interval=1")}) {
    if (way.ends_with("interval=1")) copy_over(folder_ / "kept", of_run());
    EXPECT_EQ(course(trained({saved(), way}, 1, on)), course(rest)) << way;
    fs::remove_all(folder_ / "run");
    fs::copy(folder_ / "run_before", folder_ / "run", fs::copy_options::recursive);
  }
}

/// Two runs of other weights that were given one file, which is of the one that began last.
TEST_F(PreferenceReference, OfAnotherRunIsLeftToItByVerify) {
  const std::string one_file = "training.preference.reference_file=" + in("both");
  trained({saved(), one_file, "training.save_interval=2"}, 1, {"--steps", "4"});
  trained({"training.seed=9", one_file}, 1, {"--steps", "1"});
  const std::string bytes = read_text(folder_ / "both");
  expect_agrees({"--step", "2"});  // from the beginning, where the reference is at hand
  const Outcome later = verify({"--step", "4"});
  EXPECT_EQ(count(later.out, "does NOT agree"), 0u) << "what is not known is not judged: " << later.out;
  EXPECT_NE(later.code, 0);
  EXPECT_THAT(later.err, HasSubstr(in("both") + "' has other log-probabilities"));
  EXPECT_EQ(read_text(folder_ / "both"), bytes) << "it reads only";
  fs::remove(folder_ / "both");
  expect_agrees({"--step", "2"});
  EXPECT_THAT(verify({"--step", "4"}).err, HasSubstr("are not in '" + in("both") + "'"));
  EXPECT_FALSE(fs::exists(folder_ / "both"));
}

/// All published weights lie halfway between two numbers of bf16, where the ways to round differ.
TEST_F(PreferenceReference, ACopyRoundsAsTrainingDoes) {
  trained({saved()}, 1, {"--steps", "1"});
  ASSERT_EQ(sherd({"export", in("run"), "--output", in("published")}).code, 0);
  std::string file = read_text(folder_ / "published" / "model.safetensors");
  std::uint64_t header = 0;
  std::memcpy(&header, file.data(), sizeof(header));
  for (std::size_t at = sizeof(header) + header; at < file.size(); at += sizeof(float))
    file[at] = 0, file[at + 1] = static_cast<char>(0x80);
  write_text(folder_ / "published" / "model.safetensors", file);
  for (const std::string& how : {std::string("zero_optimization.stage=3"), lora_})
    expect_begins_as_the_reference(trained({"training.init_from=" + in("published"), "bf16.enabled=true",
                                            "training.preference.reference=copy", how},
                                           2, {"--steps", "1"})
                                       .front());
}

TEST_F(PreferenceReference, GoesWithItsRun) {
  const auto whole = trained({}, 1, {"--steps", "6"});
  trained({saved(), "training.save_interval=2"}, 1, {"--steps", "4"});
  fs::rename(folder_ / "run", folder_ / "moved");
  const Outcome outcome = sherd({"verify", in("moved")});
  EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr(run_agrees));
  const std::vector<Json> rest(whole.begin() + 4, whole.end());
  EXPECT_EQ(course(trained({"training.save_dir=" + in("moved")}, 2, {"--resume", "--steps", "6"})),
            course(rest));
}

TEST_F(PreferenceReference, OfAnotherKindIsNoOtherTraining) {
  trained({saved(), "training.save_interval=2"}, 1, {"--steps", "4"});
  fs::rename(of_run(), folder_ / "kept");
  expect_agrees({"--set", "training.preference.reference=copy"});
  expect_agrees({"--set", "training.preference.reference_file=" + in("kept")});
  const Outcome refused = verify({"--set", "training.preference.beta=0.2"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("training.preference.beta: what is trained is as the run had it"));
}

TEST_F(PreferenceReference, KeysThatChangeOnResumeAreALineEach) {
  trained({saved()}, 1, {"--steps", "2"});
  trained({saved(), "training.preference.beta=0.2"}, 1, {"--steps", "3", "--resume"});
  EXPECT_EQ(count(said_, "] resuming "), 1u) << said_;
  EXPECT_THAT(said_, HasSubstr("training.preference.beta was 0.1 and is 0.2"));
}

}  // namespace
}  // namespace sherd::cli
