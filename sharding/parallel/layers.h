#pragma once

// Everything in this room: what it takes to write a model that several ranks share.
#include "sharding/parallel/adapters/adapters.h"
#include "sharding/parallel/attention.h"
#include "sharding/parallel/collectives.h"
#include "sharding/parallel/embedding.h"
#include "sharding/parallel/experts/moe.h"
#include "sharding/parallel/layout.h"
#include "sharding/parallel/linear.h"
#include "sharding/parallel/loss.h"
#include "sharding/parallel/sequence.h"
