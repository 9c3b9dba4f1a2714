#include "cli/program.h"

int main(int argc, char** argv) {
  return sherd::cli::run_program({argv + (argc > 0), argv + argc});
}
