-- Which plane a request belongs to, and for the data plane which sandbox, port and node.
--
-- Runs in Envoy for every request, before its route is chosen. It only computes headers; every answer is
-- written by Envoy (see `proxy.replies`):
--   x-greenroom-cluster   the node's cluster: the request goes to a sandbox. A name that no cluster has
--                         (a malformed id, an unknown node) is answered as a sandbox that was not found.
--   x-greenroom-sandbox, x-greenroom-port   for the relay
--   x-greenroom-refusal   why the request is answered 400
-- None of these: the request goes to the api. DOMAIN is prepended: the domain of sandboxes' host names.

-- Requests get an x-request-id from Envoy, or keep the client's if it is a token that a log may carry;
-- anything else is replaced.

local SANDBOX_HOST = "^(%d+)%-([^.]*)%.(.+)$"

-- Ours must come from here. Envoy's own (x-envoy-retry-on and the like) would let clients steer the router.
local function forget_spoofed(headers)
  local spoofed = {}
  for name, _ in pairs(headers) do
    if name:find("^x[-_]greenroom[-_]") or name:find("^x%-envoy%-") then
      spoofed[#spoofed + 1] = name
    end
  end
  for _, name in ipairs(spoofed) do
    headers:remove(name)
  end
end

local replaced = 0

local function keep_sane_request_id(handle, headers)
  local id = headers:get("x-request-id") or ""
  if #id <= 64 and id:find("^[%w._-]+$") ~= nil then
    return
  end
  replaced = replaced + 1
  local now = handle:timestampString(EnvoyTimestampResolution.MICROSECOND)
  headers:replace("x-request-id", string.format("%s-%d", now, replaced))
end

-- The host in lower case without port and without the root's dot; nil for an address in brackets.
local function host_of(authority)
  local host = authority:match("^([^:%[%]]+)")
  if host == nil then
    return nil
  end
  return (host:lower():gsub("%.$", ""))
end

local function cluster_of(id)
  local code = id:match("^i([a-z0-9][a-z0-9][a-z0-9][a-z0-9])[a-z0-9]+$")
  if code == nil or #id ~= 20 then
    return "none"
  end
  return "node_" .. code
end

local function is_port(text)
  return #text <= 5 and text:find("^[1-9]%d*$") ~= nil and tonumber(text) <= 65535
end

function envoy_on_request(handle)
  local headers = handle:headers()
  forget_spoofed(headers)
  keep_sane_request_id(handle, headers)
  local port, id, domain
  local host = host_of(headers:get(":authority") or "")
  if host ~= nil then
    port, id, domain = host:match(SANDBOX_HOST)
  end
  if domain ~= DOMAIN then
    id, port = headers:get("e2b-sandbox-id"), headers:get("e2b-sandbox-port")
    if id == nil and port == nil then
      -- Envoy passes on what follows an upgrade request unread, so the api would get requests from us that
      -- kept their x-greenroom headers. It offers no upgrade anyway.
      if headers:get("upgrade") ~= nil then
        headers:replace("x-greenroom-refusal", "the api offers no upgrade")
      end
      return
    end
    if id == nil or port == nil then
      headers:replace("x-greenroom-refusal", "E2b-Sandbox-Id and E2b-Sandbox-Port belong together; one is missing")
      return
    end
  end
  if not is_port(port) then
    headers:replace("x-greenroom-refusal", "the sandbox port must be a number from 1 to 65535")
    return
  end
  headers:replace("x-greenroom-sandbox", id:sub(1, 64))
  headers:replace("x-greenroom-port", port)
  headers:replace("x-greenroom-cluster", cluster_of(id))
end
