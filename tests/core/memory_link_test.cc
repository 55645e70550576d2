// Messages between simulated ranks.
#include "transport/memory_link.h"

#include "check.h"
#include "transport/transport.h"

namespace hvdtorch::test {
namespace {

const Case links("messages match by peer and tag, in order", [] {
  const auto links = make_memory_links(2);
  int values[3] = {1, 2, 3}, got[3] = {};
  std::vector<std::unique_ptr<PointToPoint::Request>> requests;
  requests.push_back(links[0]->send(&values[0], sizeof(int), 1, 7));
  requests.push_back(links[0]->send(&values[1], sizeof(int), 1, 8));
  requests.push_back(links[0]->send(&values[2], sizeof(int), 1, 7));
  requests.push_back(links[1]->recv(&got[1], sizeof(int), 0, 8));
  requests.push_back(links[1]->recv(&got[0], sizeof(int), 0, 7));
  requests.push_back(links[1]->recv(&got[2], sizeof(int), 0, 7));
  for (auto& request : requests) request->wait();
  check_eq(std::vector<int>(got, got + 3), std::vector<int>{1, 2, 3});
});

const Case aborted("an aborted request throws, and no later one takes its place", [] {
  const auto links = make_memory_links(2);
  int value = 5, got = 0;
  auto lost = links[1]->recv(&got, sizeof(int), 0, 9);
  lost->abort();
  auto next = links[1]->recv(&got, sizeof(int), 0, 9);
  auto send = links[0]->send(&value, sizeof(int), 1, 9);
  auto late = links[1]->recv(&got, sizeof(int), 0, 9);
  for (auto* request : {lost.get(), next.get(), send.get(), late.get()}) {
    request->abort();  // of a request that was matched, it would do nothing
    check_eq(check_throws<TransportError>([&] { request->wait(); }), std::string("aborted"));
  }
  check_eq(got, 0);
});

const Case mismatch("lengths that differ fail on both sides", [] {
  const auto links = make_memory_links(2);
  char data[3] = {};
  auto send = links[0]->send(data, 2, 1, 4);
  auto receive = links[1]->recv(data, 3, 0, 4);
  for (auto* request : {send.get(), receive.get()}) {
    check_contains(check_throws<TransportError>([&] { request->wait(); }),
                   "from rank 0 to rank 1, tag 4: 2 bytes were sent and 3 were expected");
  }
});

const Case gone("a rank whose link was destroyed fails what was and will be posted with it", [] {
  auto links = make_memory_links(3);
  char data = 1, other = 0;
  auto before = links[0]->recv(&data, 1, 1, 0);
  auto unaffected = links[0]->recv(&other, 1, 2, 0);
  links[1].reset();
  auto after = links[0]->send(&data, 1, 1, 0);
  for (auto* request : {before.get(), after.get()}) {
    check_eq(check_throws<TransportError>([&] { request->wait(); }), std::string("rank 1 is gone"));
  }
  links[2]->send(&data, 1, 0, 0)->wait();
  unaffected->wait();
  check_eq(other, data);
});

}  // namespace
}  // namespace hvdtorch::test
