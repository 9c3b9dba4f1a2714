#include <gtest/gtest.h>

#include <algorithm>

#include "config/support.h"

namespace sherd::config {
namespace {

Config of(const std::string& type, const std::string& params = "", const std::string& more = "") {
  return parse_text(cat(R"({"optimizer": {"type": ")", type, "\"",
                        params.empty() ? "" : ", \"params\": " + params, "}", more, "}"));
}

TEST(Optimizers, AreNamedInAnyCase) {
  for (const OptimizerType type : optimizer_types()) {
    std::string lower = name_of(type);
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    for (const std::string& name : {std::string(name_of(type)), lower}) {
      EXPECT_EQ(of(name).optimizer.type, type);
      EXPECT_TRUE(static_cast<const OptimizerRule&>(of(name, "{}").optimizer) == default_rule(type));
    }
  }
}

TEST(Optimizers, MuonHasTwoRates) {
  const auto rates = [](const std::string& params) {
    const Optimizer optimizer = of("Muon", params).optimizer;
    return std::pair(optimizer.lr, optimizer.as<MuonOptions>().adam_lr.value_or(optimizer.lr));
  };
  EXPECT_EQ(rates("{}"), std::pair(1e-3, 1e-3));
  EXPECT_EQ(rates(R"({"lr": 0.5})"), std::pair(0.5, 0.5));
  EXPECT_EQ(rates(R"({"adam_lr": 0.25, "lr": 0.5})"), std::pair(0.5, 0.25));
  EXPECT_EQ(rates(R"({"muon_lr": 2, "lr": 0.5})"), std::pair(2.0, 0.5));
  EXPECT_EQ(rates(R"({"muon_lr": 2, "adam_lr": 0.25})"), std::pair(2.0, 0.25));
  EXPECT_EQ(rates(R"({"muon_lr": 0})"), std::pair(0.0, 1e-3));
}

TEST(Optimizers, MuonHasTorchsDefaults) {
  const Optimizer optimizer = of("Muon").optimizer;
  EXPECT_EQ(optimizer.weight_decay, 0.1);
  const auto& muon = optimizer.as<MuonOptions>();
  EXPECT_EQ(muon.momentum, 0.95);
  EXPECT_TRUE(muon.nesterov);
  EXPECT_EQ(muon.ns_steps, 5);
  EXPECT_EQ(muon.ns_coefficients, (std::array<double, 3>{3.4445, -4.775, 2.0315}));
  EXPECT_EQ(muon.ns_eps, 1e-7);
  EXPECT_EQ(muon.adjust_lr_fn, MuonScale::original);
}

TEST(Optimizers, HaveTheirOwnDefaults) {
  const Optimizer lion = of("Lion").optimizer, adagrad = of("Adagrad").optimizer, sgd = of("SGD").optimizer;
  EXPECT_EQ(lion.lr, 1e-4);
  EXPECT_EQ(lion.betas()->beta1, 0.9);
  EXPECT_EQ(lion.betas()->beta2, 0.99);
  EXPECT_EQ(lion.weight_decay, 0);
  EXPECT_EQ(adagrad.lr, 1e-2);
  EXPECT_EQ(adagrad.as<AdagradOptions>().eps, 1e-10);
  EXPECT_EQ(adagrad.as<AdagradOptions>().lr_decay, 0);
  EXPECT_EQ(adagrad.as<AdagradOptions>().initial_accumulator_value, 0);
  EXPECT_EQ(sgd.lr, 1e-3);
}

TEST(Optimizers, SayWhereADefaultIsNotDeepSpeeds) {
  for (const std::string params : {"", "{}", R"({"weight_decay": 0.1})"}) {
    EXPECT_TRUE(has_note(of("Lion", params), "optimizer.params.lr: not given: 1e-4")) << params;
    EXPECT_TRUE(has_note(of("Lion", params), "optimizer.params.betas: not given: [0.9, 0.99]")) << params;
    EXPECT_FALSE(has_note(of("AdamW", params), "optimizer.params")) << params;
  }
  EXPECT_FALSE(has_note(of("Lion", R"({"lr": 1e-4, "betas": [0.9, 0.99]})"), "optimizer.params"));
}

TEST(Optimizers, CycleBetasWhereTheyHaveThem) {
  const std::string cycle =
      R"(, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}})";
  for (const char* with : {"Adam", "AdamW", "Lion"})
    EXPECT_FALSE(has_note(of(with, "", cycle), "scheduler.params.cycle_momentum")) << with;
  for (const char* without : {"SGD", "Adagrad"})
    EXPECT_TRUE(has_note(of(without, "", cycle), cat("scheduler.params.cycle_momentum: no effect with ",
                                                     without, ", which has no betas")));
}

TEST(Optimizers, NoteMomentsDtypeWhereNoneAreKept) {
  const std::string bf16 = R"(, "training": {"moments_dtype": "bf16"})";
  EXPECT_TRUE(has_note(of("SGD", "", bf16), "training.moments_dtype: no effect"));
  for (const char* type : {"Adam", "AdamW", "Lion", "Adagrad"})
    EXPECT_FALSE(has_note(of(type, "", bf16), "training.moments_dtype")) << type;
}

TEST(Optimizers, RefuseParametersOfOthers) {
  const auto error = [](const std::string& type, const std::string& params) {
    return error_of(cat(R"({"optimizer": {"type": ")", type, R"(", "params": )", params, "}}"));
  };
  EXPECT_NE(error("Lion", R"({"eps": 1e-8})").find("unknown key \"optimizer.params.eps\""),
            std::string::npos);
  EXPECT_NE(error("AdamW", R"({"lr_decay": 0.1})").find("it belongs to the type Adagrad"), std::string::npos);
  EXPECT_NE(error("Adagrad", R"({"lr_decay": -0.1})").find("params.lr_decay: must be"), std::string::npos);
  EXPECT_NE(error("Adagrad", R"({"initial_accumulator_value": -1})").find("must be"), std::string::npos);
  EXPECT_NE(error("Lion", R"({"betas": [0.9, 1]})").find("must be below 1"), std::string::npos);
}

}  // namespace
}  // namespace sherd::config
