"""Tests of the worker: deliverables that cannot be sent, wakeups that cannot be read, and requests
whose responses are lost."""

import asyncio
import json
import unittest

from toolcrib_sdk.utp import Worker, rpc
from toolcrib_sdk.utp.worker import Turn

ITEM = {
    "message_type": "turn",
    "payload": {
        "agent_id": "expert",
        "agent_turn_id": "turn_1",
        "turn_epoch": 1,
        "instruction": "work",
        "deadline_at_ms": 4_000_000_000_000,
    },
}


class RecordingWorker(Worker):
    """A worker that records its requests instead of sending them."""

    def __init__(self, refused: str = "") -> None:
        super().__init__(target="w")
        self.requests = []
        self.refused = refused

    async def _request(self, subject, body):
        operation = subject.rsplit(".", 1)[1]
        json.dumps(body)
        self.requests.append((operation, dict(body)))
        if operation == self.refused:
            raise rpc.RequestRefused({"message": "it is too large"})
        results = [{"status": "success", "result": 42}]
        return {"ok": True, "turn_epoch": 2, "results": results, "items": []}

    def drive(self, handler):
        turn = Turn(self, "cg.v1r3.p.public", ITEM)
        turn.turn_epoch = 2
        asyncio.run(self._execute(turn, handler))
        return [(operation, body.get("status")) for operation, body in self.requests]


class DeliverableTest(unittest.TestCase):
    def test_a_refused_deliverable_fails_the_turn(self):
        async def handler(turn):
            return {"answer": 1}

        sent = RecordingWorker(refused="put").drive(handler)
        self.assertEqual(sent, [("put", None), ("finish", "failed")])

    def test_a_deliverable_that_is_no_json_fails_the_turn(self):
        async def handler(turn):
            return {"answer": object()}

        sent = RecordingWorker().drive(handler)
        self.assertEqual(sent, [("finish", "failed")])


class UsageTest(unittest.TestCase):
    def test_the_tokens_of_a_handler_are_reported(self):
        async def handler(turn):
            turn.tokens += 120
            answer = await turn.call_tool("word_count", text="x")
            turn.tokens += 30
            return answer

        worker = RecordingWorker()
        worker.drive(handler)
        reported = {operation: body.get("tokens") for operation, body in worker.requests}
        self.assertEqual((reported["dispatch"], reported["finish"]), (120, 150))

    def test_a_handler_without_a_model_reports_nothing(self):
        async def handler(turn):
            return "x"

        worker = RecordingWorker()
        worker.drive(handler)
        self.assertNotIn("tokens", worker.requests[-1][1])


class WakeupTest(unittest.TestCase):
    def test_a_wakeup_that_is_no_json_does_not_end_the_worker(self):
        class Message:
            subject, headers, data = "cg.v1r3.p.public.cmd.agent.w.wakeup", None, b"no json"

            async def ack(self):
                pass

        class Subscription:
            def __init__(self, stop):
                self.stop = stop

            async def fetch(self, count, timeout):
                self.stop.set()
                return [Message()]

        class Stream:
            async def pull_subscribe(self, *arguments, **options):
                return Subscription(stop)

        class Connection:
            def jetstream(self):
                return Stream()

        stop = None

        async def take():
            nonlocal stop
            stop = asyncio.Event()
            worker = RecordingWorker()
            worker._nats = Connection()
            await worker._take_wakeups(stop)

        asyncio.run(take())


class RepeatedRequestTest(unittest.TestCase):
    def test_lease_and_resume_have_ids_of_their_own(self):
        worker = RecordingWorker()

        async def work():
            turn = Turn(worker, "cg.v1r3.p.public", ITEM)
            await turn._begin(60.0)
            return await turn.call_tool("calculation.eval", expression="6*7")

        self.assertEqual(asyncio.run(work()), 42)
        ids = [body["request_id"] for operation, body in worker.requests if operation != "dispatch"]
        self.assertEqual(len(ids), 2)
        self.assertNotEqual(ids[0], ids[1])


if __name__ == "__main__":
    unittest.main()
