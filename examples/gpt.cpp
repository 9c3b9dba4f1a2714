// A GPT through the C++ API: what `sherd train` does, in a page. The configuration names the model, the
// dataset that `sherd prepare` wrote, and everything else.
//
//   build/examples/gpt CONFIG.json [--ranks N]        or        mpirun -n N build/examples/gpt CONFIG.json
#include <sherd/sherd.h>

#include <cstdio>

using namespace sherd;

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: gpt CONFIG.json [--ranks N]\n"), 2;
  return launch(argc, argv, [&](DistributedPtr dist) {
    const config::Config config = config::parse_files({argv[1]});
    const auto data = engine::open_token_data(config);
    auto model = std::make_shared<models::Gpt>(models::gpt_config(config, data->vocab_size));
    auto [engine, optimizer, loader, scheduler] =
        initialize({.dist = dist, .model = model, .config = config});

    while (engine->global_steps() < config.training.steps) {
      const auto& step = engine->train_batch([&loader = loader] { return loader->next(); });
      if (dist->rank() == 0)
        std::printf("step %lld  loss %.4f  lr %.2e  norm %.3f  %.0f ms\n",
                    static_cast<long long>(engine->global_steps()), step.loss, step.lr[0], step.grad_norm,
                    step.times.total());
    }
    if (data->validation) {
      const auto validation =
          data->validation_loader(engine->loader_rank(), engine->train_batch_size(), engine->device());
      const double loss = engine->eval_batch(validation->next());
      if (dist->rank() == 0) std::printf("validation loss %.4f\n", loss);
    }
    engine->synchronize();  // a GPU's last update is looked at here
    if (!config.training.save_dir.empty()) engine->save_checkpoint(config.training.save_dir);

    // Sampling runs on all ranks alike; under stage 3 each step gathers block by block.
    const auto tokenizer = data::make_tokenizer(data->tokenizer);
    const std::vector<std::int32_t> prompt{tokenizer->end_of_document()};
    std::vector<std::int32_t> text;
    engine->evaluate([&](autograd::Tape& tape) {
      text = models::generate(*model, tape, prompt, 64, {.temperature = 0.8, .top_k = 40, .key = {1, 2}});
    });
    if (dist->rank() == 0) std::printf("%s\n", tokenizer->decode(text).c_str());
  });
}
