"""An event-driven model of dispatch and combine between nodes: it predicts, nothing in it was measured."""
