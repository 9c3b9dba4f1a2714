#pragma once

#include "comm/exchange/backend.h"

namespace sherd::comm {

/// A backend with a function for each collective, in which the ranks' calls have been, or are still to be
/// compared.
class CollectiveBackend : public Backend {
 protected:
  /// Calls the function of the call's kind. Throws Error{usage} for a transfer.
  void dispatch(Call& call);

 private:
  virtual void barrier(Call& call) = 0;
  virtual void all_gather(Call& call) = 0;
  virtual void reduce_scatter(Call& call) = 0;
  virtual void all_reduce(Call& call) = 0;
  virtual void broadcast(Call& call) = 0;
  virtual void all_to_all(Call& call) = 0;
  virtual void agree(Call& call) = 0;
};

}  // namespace sherd::comm
