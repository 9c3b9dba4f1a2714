#pragma once

#include "optim/rules/adagrad.h"
#include "optim/rules/adam.h"
#include "optim/rules/lamb.h"
#include "optim/rules/lars.h"
#include "optim/rules/lion.h"
#include "optim/rules/muon.h"
#include "optim/rules/one_bit_adam.h"
#include "optim/rules/sgd.h"

namespace sherd::optim {

/// Every update rule. The loops of each instruction set, the kernels and describe() follow from it. One rule
/// serves each Hyper.
using Rules = RuleList<Adam, PlainSgd, MomentumSgd, Lion, Adagrad, Lamb, Lars, OneBitAdam, MuonDirection>;

}  // namespace sherd::optim
