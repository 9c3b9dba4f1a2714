#pragma once

// Stands before src/comm/nccl/nccl_functions.h on the include path: NCCL's functions are linked in these
// tests, those of fake_nccl.cpp, and none is loaded.
