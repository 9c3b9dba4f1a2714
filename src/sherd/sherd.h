#pragma once

// Everything that a program with a model of its own needs: modules and operations to write it with,
// initialize() and the Engine to train it, datasets to train it on, and Gpt, a transformer. Names that belong
// to the contract live in sherd:: itself.

#include "autograd/experts.h"
#include "autograd/ops.h"
#include "base/log.h"
#include "data/dataset.h"
#include "data/tokenizer.h"
#include "engine/initialize.h"
#include "engine/token_data.h"
#include "engine/trainer.h"
#include "models/gpt.h"
#include "models/gpt_config.h"
#include "models/inference/generate.h"
#include "nn/layered_model.h"
#include "nn/layers.h"
#include "nn/module.h"
#include "sharding/parallel/layers.h"

namespace sherd {

using autograd::Tape;
using autograd::Var;
using tensor::Batch;
using tensor::Tensor;

}  // namespace sherd
