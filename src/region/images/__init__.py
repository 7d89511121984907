"""From upstream streams to published generations, and from those to the stream that racks and other clients read.

:mod:`~region.images.sources` says what is wanted, :mod:`~region.images.importer` fetches it,
:mod:`~region.images.store` publishes it, :mod:`~region.images.stream` serves it and :mod:`~region.images.gc` takes
away what nobody needs any more.
"""
