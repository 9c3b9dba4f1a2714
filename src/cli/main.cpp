#include "cli/program.h"

int main(int argc, char** argv) {
  sherd::cli::prepare_process();
  return sherd::cli::run_program({argv + (argc > 0), argv + argc});
}
