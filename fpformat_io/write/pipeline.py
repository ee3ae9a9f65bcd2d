"""One save: its segments one after the other, then the commit."""

import os
import time
from collections.abc import Mapping

from fpformat.names import segment_name
from fpformat.publish.staging import Staging
from fpformat.records.model import SegmentRecord, ShardKey, ShardSource
from fpformat.write.layout import SaveLayout, SegmentLayout
from fpformat_io.config import EngineConfig
from fpformat_io.control import SaveControl
from fpformat_io.write.segment import SegmentWriter
from fpformat_io.write.volume import Volume, decide
from fpformat_io.write.workers import StagingRing


class Save:
    """One save between the creation of its staging directory and its commit or removal."""

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        layout: SaveLayout,
        save_id: bytes,
        config: EngineConfig,
        control: SaveControl,
    ) -> None:
        """Take the memory, then create the staging directory.

        Raises:
            StagingError: There is not enough memory.
            PlanError: Something stands at `path`.
            SaveError: The directory cannot be made.
        """
        self._ring = StagingRing(config)
        self.staging = Staging(path, save_id)
        self.records: list[SegmentRecord] = []
        self.volumes: list[Volume] = []
        self.calls = 0
        self._layout = layout
        self._save_id = save_id
        self._config = config
        self._control = control
        self._unstaged_count = len(layout.segments)

    def write(
        self, sources: Mapping[ShardKey, ShardSource], created_us: int | None
    ) -> tuple[bytes, str]:
        """Write all segments and commit; return the manifest and the checkpoint id."""
        created_us = time.time_ns() // 1000 if created_us is None else created_us
        try:
            for segment in self._layout.segments:
                self.records.append(self._write_segment(segment, sources))
            self.staging.seal()
            document, checkpoint_id = self._layout.manifest(
                self.records, save_id=self._save_id, created_us=created_us
            )
            self._control.check()
            self.staging.publish(document)
        except BaseException:
            self.staging.abandon()
            raise
        return document, checkpoint_id

    def _write_segment(
        self, layout: SegmentLayout, sources: Mapping[ShardKey, ShardSource]
    ) -> SegmentRecord:
        staging, geometry = self.staging, layout.geometry
        path = staging.path / segment_name(layout.ordinal)
        descriptor = staging.create_segment(layout.ordinal)
        try:
            volume = decide(descriptor, mode=self._config.mode, align=geometry.align)
            writer = SegmentWriter(
                descriptor,
                str(path),
                volume=volume,
                ring=self._ring,
                geometry=geometry,
                control=self._control,
            )
            record = writer.write(
                layout,
                sources,
                save_id=self._save_id,
                after_data=self._note_data,
            )
            staging.attempt("syncing", lambda: os.fsync(descriptor), path=path)
        finally:
            os.close(descriptor)
        self.volumes.append(writer.volume)
        self.calls += writer.calls
        return record

    def _note_data(self) -> None:
        self._unstaged_count -= 1
        if not self._unstaged_count:
            self._control.note_staged()
