// SPDX-License-Identifier: Apache-2.0
// One rack on ns-3: senders with a window each send a message to one receiver through one switch. The arithmetic of
// dqplb simulate's incast, built from nothing of it: ns-3's links, queues, IP and UDP.
// Arguments: senders, message, segment and window in bytes, RTT in ns. Prints JSON: completion_ns, peak_bytes.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "ns3/core-module.h"
#include "ns3/internet-module.h"
#include "ns3/network-module.h"
#include "ns3/point-to-point-module.h"

using namespace ns3;

namespace {

constexpr uint32_t kPayload = 4096, kWire = 4096 + 82, kAckWire = 86;
constexpr uint32_t kBelow = 2 + 20 + 8;  // PPP, IPv4, UDP: what ns-3 adds to what a socket sends
constexpr uint16_t kPort = 4791;
constexpr const char* kRate = "400Gbps";
const Time kHost = NanoSeconds(1000);  // until software handles what happened

uint64_t peak, done_ns;
uint32_t finished, senders;

// What a packet says: whose it is, which segment, and whether it is the last of it.
struct Tag {
  uint32_t sender, segment, last;
};

struct Sender {
  Ptr<Socket> socket;
  uint32_t index = 0, segments = 0, posted = 0, acked = 0, window = 0;
  uint64_t segment = 0, message = 0;

  void Post() {
    while (posted < segments && posted - acked < window) {
      uint64_t bytes = std::min(segment, message - posted * segment);
      for (uint64_t sent = 0; sent < bytes; sent += kPayload) {
        uint32_t payload = std::min<uint64_t>(kPayload, bytes - sent);
        Tag tag{index, posted, sent + payload == bytes};
        std::vector<uint8_t> data(payload + (kWire - kPayload) - kBelow);
        memcpy(data.data(), &tag, sizeof tag);
        socket->Send(Create<Packet>(data.data(), data.size()));
      }
      posted++;
    }
  }
  void Acked(Ptr<Socket> from) {
    while (from->Recv()) Simulator::Schedule(kHost, &Sender::Complete, this);
  }
  void Complete() {
    acked++;
    Post();
  }
};

std::vector<Sender> all;

void Received(Ptr<Socket> socket) {
  Address from;
  while (Ptr<Packet> packet = socket->RecvFrom(from)) {
    Tag tag;
    packet->CopyData(reinterpret_cast<uint8_t*>(&tag), sizeof tag);
    if (!tag.last) continue;
    socket->SendTo(Create<Packet>(kAckWire - kBelow), 0, from);
    if (tag.segment + 1 == all[tag.sender].segments && ++finished == senders)
      done_ns = (Simulator::Now() + kHost).GetNanoSeconds();
  }
}

void Queued(uint32_t, uint32_t now) { peak = std::max<uint64_t>(peak, now); }

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    fprintf(stderr, "usage: incast SENDERS MESSAGE_BYTES SEGMENT_BYTES WINDOW_BYTES RTT_NS\n");
    return 2;
  }
  senders = atoi(argv[1]);
  uint64_t message = atoll(argv[2]), segment = atoll(argv[3]), window = atoll(argv[4]), rtt = atoll(argv[5]);

  NodeContainer hosts, fabric;
  hosts.Create(senders + 1);
  fabric.Create(1);
  InternetStackHelper().Install(hosts);
  InternetStackHelper().Install(fabric);
  PointToPointHelper link;
  link.SetDeviceAttribute("DataRate", StringValue(kRate));
  link.SetDeviceAttribute("Mtu", UintegerValue(9000));
  link.SetChannelAttribute("Delay", TimeValue(NanoSeconds(rtt / 4)));
  link.SetQueue("ns3::DropTailQueue", "MaxSize", QueueSizeValue(QueueSize("4000000000B")));
  link.DisableFlowControl();
  std::vector<Ipv4Address> addresses;
  Ipv4AddressHelper network("10.0.0.0", "255.255.255.0");
  for (uint32_t i = 0; i <= senders; i++) {
    NetDeviceContainer ends = link.Install(hosts.Get(i), fabric.Get(0));
    addresses.push_back(network.Assign(ends).GetAddress(0));
    network.NewNetwork();
    if (i == senders)  // the way out to the receiver
      DynamicCast<PointToPointNetDevice>(ends.Get(1))->GetQueue()->TraceConnectWithoutContext("BytesInQueue", MakeCallback(&Queued));
  }
  Ipv4GlobalRoutingHelper::PopulateRoutingTables();

  Ptr<Socket> receiver = Socket::CreateSocket(hosts.Get(senders), UdpSocketFactory::GetTypeId());
  receiver->Bind(InetSocketAddress(Ipv4Address::GetAny(), kPort));
  receiver->SetRecvCallback(MakeCallback(&Received));
  all.resize(senders);
  for (uint32_t i = 0; i < senders; i++) {
    Sender& s = all[i];
    s.index = i;
    s.message = message;
    s.segment = segment;
    s.segments = (message + segment - 1) / segment;
    s.window = window / segment;
    s.socket = Socket::CreateSocket(hosts.Get(i), UdpSocketFactory::GetTypeId());
    s.socket->Bind();
    s.socket->Connect(InetSocketAddress(addresses[senders], kPort));
    s.socket->SetRecvCallback(MakeCallback(&Sender::Acked, &s));
    // The receiver says first where the message goes, and its host and this one react.
    Simulator::Schedule(NanoSeconds(rtt / 2) + kHost, &Sender::Post, &s);
  }
  Simulator::Stop(Seconds(10));
  Simulator::Run();
  printf("{\"completion_ns\": %llu, \"peak_bytes\": %llu}\n", static_cast<unsigned long long>(done_ns),
         static_cast<unsigned long long>(peak));
  Simulator::Destroy();
  return finished == senders ? 0 : 1;
}
