#include "data/packing/preference_samples.h"

#include <gtest/gtest.h>
