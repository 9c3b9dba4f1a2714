#include "engine/initialize.h"

#include <utility>

#include "base/text/excerpt.h"

#include "engine/setup/process_grid.h"
#include "engine/token_data.h"

namespace sherd {

Initialized initialize(const InitializeOptions& options) {
  Initialized out;
  require(options.dist != nullptr, "an engine needs ranks");
  config::Config asked = engine::with_rules(options.config.value(), options.parameter_groups);
  const auto groups = options.grid ? options.grid : make_groups(options.dist, asked);
  engine::require_takes_layout(options.grid || options.model.takes_layout(), *groups);
  const auto model = options.model.build(layout_of(*groups, asked));
  require(model != nullptr, "an engine needs a model");
  engine::name_parameters(asked, *model, options.parameter_groups);
  out.engine = std::make_unique<Engine>(options.dist, model, std::move(asked), nullptr, nullptr, groups);
  out.optimizer = out.engine->optimizer();
  out.scheduler = out.engine->scheduler();
  const config::Config& config = out.engine->config();
  if (options.training_data) {
    engine::require_same({{"number of training samples", std::to_string(options.training_data->size())}},
                         *options.dist);
    data::SampleLoaderOptions how = options.loader_options;
    how.drop_last = how.drop_last || config.batch.drop_last;
    auto loader = std::make_unique<data::SampleLoader>(options.training_data, out.engine->loader_rank(), how,
                                                       out.engine->device());
    if (config.parallel.pipeline > 1 && !loader->batches_are_whole())
      fail(ErrorKind::config, "a pipeline takes micro-batches of one shape, and the last one of an epoch of ",
           counted(options.training_data->size(), "sample"),
           " is smaller: set loader_options.drop_last, or dataloader_drop_last");
    out.loader = std::move(loader);
    out.engine->set_training_data(*out.loader);
  } else if (config.data) {
    const auto data = engine::open_token_data(config);
    engine::require_same_data(*data, *options.dist);
    out.loader = data->training_loader(out.engine->loader_rank(), out.engine->device());
    out.engine->set_training_data(*out.loader, data);
  }
  return out;
}

}  // namespace sherd
