#pragma once

// Every operation that a forward pass can use.
#include "autograd/arrays.h"
#include "autograd/attention.h"
#include "autograd/cross_attention.h"
#include "autograd/dropout.h"
#include "autograd/elementwise.h"
#include "autograd/embedding.h"
#include "autograd/experts.h"
#include "autograd/folds.h"
#include "autograd/linear.h"
#include "autograd/loss.h"
#include "autograd/norm.h"
