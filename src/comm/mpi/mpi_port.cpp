#include "comm/messages/port.h"

#include <mpi.h>
#include <unistd.h>

#include <mutex>
#include <new>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "comm/exchange/descriptor.h"
#include "comm/exchange/waiting.h"
#include "comm/mpi/runtime.h"

namespace sherd::comm {
namespace {

using mpi::check;

constexpr int mpi_failure_tag = 1;
constexpr int failure_bytes = 4000;

class MpiGroup final : public Port {
 public:
  /// `talk` carries messages, `side` failures; both are this group's own.
  /// `world`: every process of the world, with the machines that the ranks named.
  MpiGroup(MPI_Comm talk, MPI_Comm side, std::vector<int> world_ranks,
           std::shared_ptr<const std::vector<RankIdentity>> world)
      : talk_(talk), side_(side), world_ranks_(std::move(world_ranks)), world_(std::move(world)) {
    MPI_Comm_set_errhandler(talk_, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(side_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(talk_, &rank_);
    neighbours_.emplace(*world_, world_ranks_, rank_);
  }

  std::string kind() const override { return "mpi"; }
  void on_leave(std::function<void()> tell) override { mpi::on_leave(std::move(tell)); }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(world_ranks_.size()); }
  const std::vector<int>& world_ranks() const override { return world_ranks_; }
  int world_size() const override { return static_cast<int>(world_->size()); }
  std::vector<std::uint64_t> machines() const override {
    std::vector<std::uint64_t> out;
    for (const int r : world_ranks_) out.push_back((*world_)[static_cast<std::size_t>(r)].host);
    return out;
  }
  bool crowded() const override { return neighbours_->crowded(); }
  LocalPlace place() const override { return neighbours_->place(); }
  bool gone(int rank) const override { return neighbours_->gone(rank); }

  std::shared_ptr<Port> split(int color, int key, const Patience& patience) override {
    struct MpiResult {
      MPI_Comm talk = MPI_COMM_NULL, side = MPI_COMM_NULL;
      std::vector<int> members;
    };
    const auto result = std::make_shared<MpiResult>();  // the helper may outlive this call
    const int mine = world_ranks_[static_cast<std::size_t>(rank_)];
    block(patience, [result, talk = talk_, color, key, mine] {
      check(MPI_Comm_split(talk, color < 0 ? MPI_UNDEFINED : color, key, &result->talk), "MPI_Comm_split");
      if (result->talk == MPI_COMM_NULL) return;
      check(MPI_Comm_dup(result->talk, &result->side), "MPI_Comm_dup");
      int size = 0;
      MPI_Comm_size(result->talk, &size);
      result->members.resize(static_cast<std::size_t>(size));
      check(MPI_Allgather(&mine, 1, MPI_INT, result->members.data(), 1, MPI_INT, result->talk),
            "MPI_Allgather");
    });
    if (result->talk == MPI_COMM_NULL) return nullptr;
    return std::make_shared<MpiGroup>(result->talk, result->side, std::move(result->members), world_);
  }

  std::vector<std::byte*> shared_window(std::size_t bytes, const Patience& patience) override {
    const auto parts = std::make_shared<std::vector<std::byte*>>(static_cast<std::size_t>(size()));
    const auto code = std::make_shared<int>(MPI_SUCCESS);
    block(patience, [parts, code, bytes, talk = talk_] { *code = make_window(talk, bytes, *parts); });
    if (*code != MPI_SUCCESS)
      fail(ErrorKind::memory, patience.what, ": MPI found no room for ", bytes,
           " bytes of shared memory on each of ", counted(size(), "rank"),
           "; make /dev/shm larger (containers: --shm-size) or exchange messages instead");
    return *parts;
  }

  std::uint64_t from_first(std::uint64_t value, const Patience& patience) override {
    const auto word = std::make_shared<std::uint64_t>(value);
    block(patience, [word, talk = talk_] {
      check(MPI_Bcast(word.get(), sizeof *word, MPI_BYTE, 0, talk), "MPI_Bcast");
    });
    return *word;
  }

  void meet(const Patience& patience) override {
    block(patience, [talk = talk_] { check(MPI_Barrier(talk), "MPI_Barrier"); });
  }

  int send(const void* data, std::size_t bytes, int to, int tag) override {
    MPI_Request request;
    check(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, tag, talk_, &request), "MPI_Isend");
    return keep(request);
  }

  int receive(void* data, std::size_t bytes, int from, int tag) override {
    MPI_Request request;
    check(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, from, tag, talk_, &request), "MPI_Irecv");
    return keep(request);
  }

  bool sums(DType dtype) const override { return dtype == DType::f32 || dtype == DType::f64; }

  int reduce_scatter(const void* from, void* to, std::size_t count, DType dtype) override {
    MPI_Request request;
    check(MPI_Ireduce_scatter_block(from, to, static_cast<int>(count), type_of(dtype), MPI_SUM, talk_,
                                    &request),
          "MPI_Ireduce_scatter_block");
    return keep(request);
  }

  int all_reduce(const void* from, void* to, std::size_t count, DType dtype) override {
    MPI_Request request;
    check(MPI_Iallreduce(from, to, static_cast<int>(count), type_of(dtype), MPI_SUM, talk_, &request),
          "MPI_Iallreduce");
    return keep(request);
  }

  bool test(int request) override {
    int done = 0;
    std::lock_guard lock(mutex_);
    check(MPI_Test(&requests_[static_cast<std::size_t>(request)], &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done) free_.push_back(request);
    return done != 0;
  }

  bool cancel(int request) noexcept override {
    std::lock_guard lock(mutex_);
    MPI_Request& open = requests_[static_cast<std::size_t>(request)];
    if (open == MPI_REQUEST_NULL) return true;
    if (mpi::over()) return false;
    MPI_Cancel(&open);  // without effect on a message that has met its receive
    if (is_done(open)) return true;
    MPI_Request_free(&open);
    return false;
  }

  bool release(int request) noexcept override {
    std::lock_guard lock(mutex_);
    MPI_Request& open = requests_[static_cast<std::size_t>(request)];
    return open == MPI_REQUEST_NULL || (!mpi::over() && is_done(open));
  }

  // MPI moves messages while it is asked for them: looks that follow each other fast, then more slowly.
  std::uint64_t news() override { return 0; }
  std::uint64_t pause(std::uint64_t, int turn) override {
    if (turn >= 200 || !backoff_.yield()) usleep(turn < 2000 ? 20 : 500);
    return 0;
  }

  void broadcast_failure(const std::string& text) noexcept override {
    if (mpi::over()) return;
    const std::string* copy = keep_for_good(text.substr(0, failure_bytes));  // the sends are never waited for
    if (!copy) return;
    for (int r = 0; r < size(); ++r) {
      if (r == rank_) continue;
      MPI_Request request;
      if (MPI_Isend(copy->data(), static_cast<int>(copy->size()), MPI_BYTE, r, mpi_failure_tag, side_,
                    &request) == MPI_SUCCESS)
        MPI_Request_free(&request);
    }
  }

  std::string poll_failure() override {
    int here = 0, length = 0;
    MPI_Status status;
    std::lock_guard lock(mutex_);
    check(MPI_Iprobe(MPI_ANY_SOURCE, mpi_failure_tag, side_, &here, &status), "MPI_Iprobe");
    if (!here) return "";
    MPI_Get_count(&status, MPI_BYTE, &length);
    std::string text(static_cast<std::size_t>(length), ' ');
    check(
        MPI_Recv(text.data(), length, MPI_BYTE, status.MPI_SOURCE, mpi_failure_tag, side_, MPI_STATUS_IGNORE),
        "MPI_Recv");
    return text;
  }

 private:
  static bool is_done(MPI_Request& open) noexcept {
    int done = 0;
    return MPI_Test(&open, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done != 0;
  }

  static MPI_Datatype type_of(DType dtype) { return dtype == DType::f64 ? MPI_DOUBLE : MPI_FLOAT; }

  /// The window is never freed: MPI_Win_free is collective, and must not hang a rank whose peers have gone.
  static int make_window(MPI_Comm talk, std::size_t bytes, std::vector<std::byte*>& parts) {
    MPI_Info info;
    check(MPI_Info_create(&info), "MPI_Info_create");
    MPI_Info_set(info, "alloc_shared_noncontig", "true");  // each part near its rank's memory
    void* base = nullptr;
    MPI_Win window;
    const int code =
        MPI_Win_allocate_shared(static_cast<MPI_Aint>(bytes + shared_page), 1, info, talk, &base, &window);
    MPI_Info_free(&info);
    if (code != MPI_SUCCESS) return code;
    for (std::size_t r = 0; r < parts.size(); ++r) {
      MPI_Aint length = 0;
      int unit = 0;
      void* part = nullptr;
      check(MPI_Win_shared_query(window, static_cast<int>(r), &length, &unit, &part), "MPI_Win_shared_query");
      // OpenMPI begins parts anywhere; the offset in a page is the same for all who map it.
      const auto place = reinterpret_cast<std::uintptr_t>(part);
      parts[r] = reinterpret_cast<std::byte*>((place + shared_page - 1) / shared_page * shared_page);
    }
    return MPI_SUCCESS;
  }

  void block(const Patience& patience, const std::function<void()>& call) const {
    mpi::blocking(call, patience, [this] {
      for (int r = 0; r < size(); ++r)
        if (gone(r)) return world_ranks_[static_cast<std::size_t>(r)];
      return -1;
    });
  }

  int keep(MPI_Request request) {
    std::lock_guard lock(mutex_);
    if (free_.empty()) {
      requests_.push_back(request);
      return static_cast<int>(requests_.size()) - 1;
    }
    const int place = free_.back();
    free_.pop_back();
    requests_[static_cast<std::size_t>(place)] = request;
    return place;
  }

  MPI_Comm talk_, side_;
  std::vector<int> world_ranks_;
  std::shared_ptr<const std::vector<RankIdentity>> world_;
  int rank_ = 0;
  std::optional<Neighbours> neighbours_;
  std::mutex mutex_;
  Backoff backoff_;
  std::vector<MPI_Request> requests_;  // guarded by mutex_
  std::vector<int> free_;              // guarded by mutex_
};

}  // namespace

std::shared_ptr<Port> mpi::world_port(const Patience& patience, const std::string& machine) {
  mpi::start(patience.seconds);
  struct MpiResult {
    MPI_Comm talk = MPI_COMM_NULL, side = MPI_COMM_NULL;
    std::vector<unsigned long long> hosts;
  };
  const auto result = std::make_shared<MpiResult>();
  result->hosts.resize(mpi::identities().size());
  const unsigned long long host = own_identity(machine).host;
  mpi::blocking(
      [result, host] {
        check(MPI_Comm_dup(MPI_COMM_WORLD, &result->talk), "MPI_Comm_dup");
        check(MPI_Comm_dup(MPI_COMM_WORLD, &result->side), "MPI_Comm_dup");
        check(MPI_Allgather(&host, sizeof host, MPI_BYTE, result->hosts.data(), sizeof host, MPI_BYTE,
                            result->talk),
              "MPI_Allgather");
      },
      patience,
      [] {
        const auto& all = mpi::identities();
        for (std::size_t r = 0; r < all.size(); ++r)
          if (all[r].pid != 0 && all[r].host == own_identity().host && !running(all[r]))
            return static_cast<int>(r);
        return -1;
      });
  auto world = std::make_shared<std::vector<RankIdentity>>(mpi::identities());
  for (std::size_t r = 0; r < world->size(); ++r) (*world)[r].host = result->hosts[r];
  std::vector<int> members(world->size());
  std::iota(members.begin(), members.end(), 0);
  return std::make_shared<MpiGroup>(result->talk, result->side, std::move(members), std::move(world));
}

}  // namespace sherd::comm
