"""The HTTP API of the region, below ``/MAAS/api/2.0/``, with the conventions of MAAS API 2.0.

:class:`~region.api.app.Api` serves what :data:`region.api.routes.OPERATIONS` lists, for the parts that it is given;
:class:`~region.api.site.ApiRequest` is the request class that its site must use.
"""

from region.api.app import Api
from region.api.keys import ApiKey, ApiKeyStore
from region.api.oauth import Authenticator
from region.api.parts import Parts
from region.api.site import ApiRequest

__all__ = ["Api", "ApiKey", "ApiKeyStore", "ApiRequest", "Authenticator", "Parts"]
