"""One save: its segments one after the other, then the commit."""

import os
import time
from collections.abc import Mapping

from fpformat.names import segment_name
from fpformat.publish.staging import Staging
from fpformat.records.manifest import dump_manifest
from fpformat.records.model import (
    Manifest,
    SavePlan,
    SegmentPlan,
    SegmentRecord,
    ShardKey,
    ShardSource,
)
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
        plan: SavePlan,
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
        self._plan = plan
        self._save_id = save_id
        self._config = config
        self._control = control
        self._unstaged_count = len(plan.segments)

    def write(
        self, sources: Mapping[ShardKey, ShardSource], created_us: int | None
    ) -> tuple[bytes, str]:
        """Write all segments and commit; return the manifest and the checkpoint id."""
        plan = self._plan
        try:
            for ordinal, segment in enumerate(plan.segments):
                self.records.append(self._write_segment(ordinal, segment, sources))
            self.staging.seal()
            manifest = Manifest(
                save_id=self._save_id,
                segments=tuple(self.records),
                created_us=time.time_ns() // 1000 if created_us is None else created_us,
                step=plan.step,
                user=plan.user,
                world_size=plan.world_size,
                extensions=plan.extensions,
            )
            document, checkpoint_id = dump_manifest(manifest)
            self._control.check()
            self.staging.publish(document)
        except BaseException:
            self.staging.abandon()
            raise
        return document, checkpoint_id

    def _write_segment(
        self, ordinal: int, segment: SegmentPlan, sources: Mapping[ShardKey, ShardSource]
    ) -> SegmentRecord:
        staging, geometry = self.staging, self._plan.geometry
        path = staging.path / segment_name(ordinal)
        descriptor = staging.create_segment(ordinal)
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
                segment,
                sources,
                ordinal=ordinal,
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
